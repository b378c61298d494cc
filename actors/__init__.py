"""Tandem's processes on Ray. Every `ray.*` call of the project is in this package."""
