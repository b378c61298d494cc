"""The `tandem` command: one file per subcommand, and what they share."""
