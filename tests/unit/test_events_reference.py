"""docs/reference/events.md lists the whole catalogue, and its example runs."""

from pathlib import Path

from sdk_trio.events import DEFAULT_CATALOG, Event, Payload

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "events.md"


def test_the_page_names_every_type_class_and_field() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for row in DEFAULT_CATALOG:
        assert f"| `{row.wire_type}` | `{row.event_class.__name__}` |" in page
        assert f"### {row.data_class.__name__}\n" in page


def test_the_example_of_the_page_runs() -> None:
    page = PAGE.read_text(encoding="utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(example, "events.md", "exec"), names)
    event_class = names["InvoiceSentEvent"]
    assert isinstance(event_class, type)
    assert issubclass(event_class, Event)
    data_class = names["InvoiceData"]
    assert isinstance(data_class, type)
    assert issubclass(data_class, Payload)
