"""`genesis supervise`: keeps one run alive, and records why it stopped."""
