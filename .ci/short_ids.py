"""A pytest plugin that shortens the ids of tests whose parameters are long texts, bytes or numbers.

Pytest puts the id of the running test into the environment (`PYTEST_CURRENT_TEST`), which every process that a test
starts inherits. Linux refuses to start a program with a variable of more than 128 KiB.
"""

MAX_CHARACTERS = 80


def pytest_make_parametrize_id(val: object) -> str | None:
    """Returns the beginning and the length of a long value, or None for pytest's own choice."""
    if isinstance(val, int):
        # A number of many digits has no decimal text: `sys.set_int_max_str_digits`.
        return f"int-of-{val.bit_length()}-bits" if val.bit_length() > MAX_CHARACTERS * 3 else None
    if not isinstance(val, str | bytes) or len(val) <= MAX_CHARACTERS:
        return None
    text = val if isinstance(val, str) else val.decode("latin-1")
    return f"{text[:MAX_CHARACTERS]}...{len(val)}"
