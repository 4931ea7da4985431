"""Data beside the repository that tests compare with; it is not a part of it."""

from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]


def shared(name: str) -> Path:
    """Return the path of ``../shared/NAME``, seen from the repository or a worktree below it.

    The path may not exist; the test is then skipped.
    """
    places = [parent / "shared" / name for parent in _REPOSITORY.parents]
    return next((place for place in places if place.exists()), places[0])
