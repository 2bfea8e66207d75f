"""The OpenAPI document as a page that needs no network."""

from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .25rem; }
code, pre { font: .9rem ui-monospace, monospace; overflow-wrap: anywhere; }
pre { padding: .6rem; border: 1px solid #8884; border-radius: .4rem; overflow-x: auto; }
.method { display: inline-block; min-width: 3.2rem; font-weight: 700; }
td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
"""


def build_docs_page(document: dict[str, Any]) -> str:
    """The document for people: each operation, its parameters, its responses and an example."""
    info, parts = document["info"], list[str]()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method != "parameters":
                parts.append(_describe_operation(method, path, operation))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['summary'])}; "
        '<a href="openapi.json">openapi.json</a></p>' + "".join(parts) + "</main></body></html>"
    )


def _describe_operation(method: str, path: str, operation: dict[str, Any]) -> str:
    """One operation as HTML."""
    rows = [(f"?{one['name']}=", one["description"]) for one in operation.get("parameters", [])] + [
        (status, one["description"]) for status, one in operation["responses"].items()
    ]
    table = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"
        for name, text in rows
    )
    samples = "".join(
        f"<pre>{escape(one['source'])}</pre>" for one in operation.get("x-codeSamples", [])
    )
    kinds = ", ".join(operation.get("requestBody", {}).get("content", {}))
    takes = f"<p>Takes <code>{escape(kinds)}</code>.</p>" if kinds else ""
    return (
        f'<h2><span class="method">{method.upper()}</span> <code>{escape(path)}</code></h2>'
        f"<p>{escape(operation['summary'])}. {escape(operation.get('description', ''))}</p>"
        f"{takes}{samples}<table>{table}</table>"
    )
