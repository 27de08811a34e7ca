"""Data on disk or on a server: files written completely or not at all (`files`), locks between processes
(`exclusive`), checkpoints of arrays (`checkpoint`), and rows that processes share (`stores`): in SQLite files
(`sqlite`) or on a PostgreSQL server (`postgres`)."""
