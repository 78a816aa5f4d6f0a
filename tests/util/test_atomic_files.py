"""Files that survive a crash, and others who write them at the same time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fl_strategies._util.files import replace_file


def test_a_file_has_the_whole_content_of_one_writer(tmp_path: Path) -> None:
    """Two that replace it at once do not mix, and leave nothing else behind."""
    path = tmp_path / "kept"
    contents = [bytes([letter]) * 5_000 for letter in b"abcdefgh"]

    def write(content: bytes) -> None:
        for _ in range(20):
            replace_file(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as writers:
        list(writers.map(write, contents))

    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]
