"""Write what is generated: docs/options.md, docs/models.md and the sizes of the models."""

import json
from pathlib import Path

from phalanx.catalog.models import MODELS
from phalanx.catalog.sizes import SIZES, load_sizes, models_page
from phalanx.config.reference import options_page
from phalanx.models.count import count_size

DOCS = Path(__file__).parents[1] / "docs"


def sizes_text() -> str:
    """catalog/sizes.json, a line a model."""
    rows = (
        f"  {json.dumps(name)}: {json.dumps(vars(count_size(variant)[0]))}"
        for name, variant in MODELS.items()
    )
    return "{\n" + ",\n".join(rows) + "\n}\n"


def write(path: Path, text: str) -> None:
    """Replace a file and say which."""
    path.write_text(text, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    write(Path(str(SIZES)), sizes_text())
    load_sizes.cache_clear()
    write(DOCS / "options.md", options_page())
    write(DOCS / "models.md", models_page())
