"""Write the generated pages: docs/options.md."""

from pathlib import Path

from phalanx.config.reference import options_page

if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "options.md"
    page.write_text(options_page(), encoding="utf-8")
    print(page)
