"""What tests ask of a picture."""

from pathlib import Path


def size_of(picture: Path) -> tuple[int, int]:
    """Read the size from a PNG file's own header."""
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
