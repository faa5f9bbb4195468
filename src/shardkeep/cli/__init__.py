"""The command. Each module is one subcommand; nothing here decides what the library does not."""
