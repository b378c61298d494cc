"""A cluster simulated in discrete events, to compare what routers do with the same requests. Pure Python."""
