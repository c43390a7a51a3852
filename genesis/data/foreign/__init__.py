"""Tokens that other tools wrote, read where they lie: what their files hold, and corpora made of them."""
