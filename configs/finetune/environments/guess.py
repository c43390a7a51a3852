"""A text game: the model guesses a number from 1 to 8, and hears whether the number is higher or lower."""

from typing import Any

MAX_TURNS = 3
NUMBERS = range(1, 9)


class Guess:
    """Gives 1 for the number, and ends after `MAX_TURNS` guesses."""

    def reset(self, record: dict[str, Any], seed: int) -> None:
        """Begins an episode; the record's prompt asks for the first guess."""
        self.number, self.num_turns = int(record["number"]), 0

    def step(self, message: dict[str, Any]) -> tuple[str, float, bool]:
        """Returns the answer to a guess, the reward, and whether the game has ended."""
        self.num_turns += 1
        text = message["content"].strip()
        guess = int(text) if text in map(str, NUMBERS) else None
        if guess == self.number:
            return "Right.", 1.0, True
        answer = "Write a number." if guess is None else "Higher." if guess < self.number else "Lower."
        return answer, 0.0, self.num_turns == MAX_TURNS
