"""An object of JSON that comes in parts: how far a text has it."""


class StreamedObject:
    """Finds the end of an object in a text that grows. Each character is looked at once.

    Args:
        start: Where the object begins in the text.

    Example:
        >>> found = StreamedObject(2)
        >>> found.read('a {"b'), found.read('a {"b": "}"} c')
        ('{"b', '": "}"}')
    """

    def __init__(self, start: int) -> None:
        self._place, self._depth = start, 0
        self._is_quoted = self._is_escaped = self._has_ended = False

    def read(self, text: str) -> str:
        """Returns the new part of the object."""
        start = self._place
        while self._place < len(text) and not self._has_ended:
            self._step(text[self._place])
            self._place += 1
        return text[start : self._place]

    def _step(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_quoted:
            self._is_escaped = character == "\\"
            self._is_quoted = character != '"'
        elif character == '"':
            self._is_quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self._has_ended = self._depth == 0
