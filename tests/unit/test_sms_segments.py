import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs import node_package, program

from sdk_trio.config.options.notifications import cut_sms, measure_sms

BASIC = (
    "@£$¥èéùìòÇ\nØøÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?¡"
    "ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
EXTENSION = "^{}\\[~]|€"

gsm7 = st.text(st.sampled_from(BASIC + EXTENSION), max_size=700)
wide = st.text(st.sampled_from("aЖ漢😀…é"), max_size=300)


@pytest.mark.parametrize(
    ("text", "encoding", "units", "segments"),
    [
        ("", "GSM-7", 0, 0),
        ("a", "GSM-7", 1, 1),
        ("a" * 160, "GSM-7", 160, 1),
        ("a" * 161, "GSM-7", 161, 2),
        ("a" * 306, "GSM-7", 306, 2),
        ("a" * 307, "GSM-7", 307, 3),
        ("€" * 80, "GSM-7", 160, 1),
        ("€" * 81, "GSM-7", 162, 2),
        # The 153rd place of a segment is too small for a character of two.
        ("a" * 152 + "€" + "a" * 152, "GSM-7", 306, 3),
        ("…", "UCS-2", 1, 1),
        ("ж" * 70, "UCS-2", 70, 1),
        ("ж" * 71, "UCS-2", 71, 2),
        ("ж" * 135, "UCS-2", 135, 3),
        ("😀" * 35, "UCS-2", 70, 1),
        ("ж" * 66 + "😀" + "ж" * 66, "UCS-2", 134, 3),
    ],
)
def test_sizes(text, encoding, units, segments):
    size = measure_sms(text)
    assert (size.encoding, size.units, size.segments) == (encoding, units, segments)


def test_the_alphabet_has_the_standard_s_size():
    # 128 codes, of which one is the escape and one the carriage return.
    assert len(set(BASIC)) == 126
    assert all(measure_sms(c).units == 1 for c in BASIC + "\r")
    assert all(measure_sms(c) == measure_sms("ab") for c in EXTENSION)


@given(gsm7 | wide, st.text(max_size=3))
def test_more_text_takes_no_fewer_segments(text, more):
    assert measure_sms(text + more).segments >= measure_sms(text).segments


@given(gsm7 | wide, st.integers(1, 4))
def test_a_cut_text_fits_and_no_more_than_needed_is_cut(text, segments):
    short = cut_sms(text, segments)
    assert measure_sms(short).segments <= segments
    if measure_sms(text).segments <= segments:
        assert short == text
    else:
        kept = short.removesuffix("...")
        assert text.startswith(kept)
        rest = text[len(kept) :]
        blank = len(rest) - len(rest.lstrip())
        assert measure_sms(text[: len(kept) + blank + 1] + "...").segments > segments


def test_an_independent_calculator_agrees():
    """The SMS provider's own calculator, which is published on npm."""
    package = node_package("sms-segments-calculator")
    samples = []

    @given(gsm7 | wide)
    def collect(text):
        samples.append(text)

    collect()
    edges = range(158, 163), range(304, 309), range(457, 462)
    samples += ["a" * n for edge in edges for n in edge]
    samples += ["a" * n + "€" * 80 for n in (0, 1, 151, 152, 153)]
    samples += ["ж" * n for n in (69, 70, 71, 133, 134, 135)] + ["😀" * n for n in (35, 36, 66, 67)]
    script = (
        "const {SegmentedMessage} = require(process.argv[1]);"
        "const texts = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "console.log(JSON.stringify(texts.map(t => { const m = new SegmentedMessage(t);"
        "return [m.encodingName, m.numberOfUnicodeScalars, m.segmentsCount]; })))"
    )
    ran = subprocess.run(
        [program("node"), "-e", script, str(package)],
        input=json.dumps(samples),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for text, (encoding, _, segments) in zip(samples, json.loads(ran.stdout), strict=True):
        if text:
            size = measure_sms(text)
            assert (size.encoding, size.segments) == (encoding, segments), text
