"""The `parse` subcommand: whole log files, read once and told."""
