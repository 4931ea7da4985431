"""Regenerates all generated files: ``make generate``.

Each module in ``MAKERS`` has a function ``files``, which returns paths and their texts.
"""

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Modules of this directory, in order. The first two write files that the package needs to be
#: imported, which the modules for pages do.
MAKERS = (
    "event_payloads",
    "event_exports",
    "client_types",
    "event_page",
    "settings_page",
    "python_api",
    "pictures",
)


def main() -> int:
    """Write the files; with ``--check``, print those that are stale."""
    parser = argparse.ArgumentParser(prog="python generate", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file differs")
    is_check = parser.parse_args().check
    differing = []
    for maker in MAKERS:
        for path, text in importlib.import_module(maker).files().items():
            if path.exists() and path.read_text("utf-8") == text:
                continue
            differing.append(path)
            if not is_check:
                path.write_text(text, "utf-8")
            print(f"{'differs' if is_check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if is_check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
