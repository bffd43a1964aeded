"""Names and types on their way out."""

import pytest

from sbxd.policy.attachment import (
    NAME_BYTES_MAX,
    OCTETS,
    attachment_headers,
    content_disposition,
    is_media_type,
    served_media_type,
    served_name,
)


@pytest.mark.case("EXP-10")
@pytest.mark.parametrize(
    ("stored", "served"),
    [
        ("report.csv", "report.csv"),
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\x\\y.txt", "y.txt"),
        ("a/b/", "b"),
        ('a"b.txt', "a_b.txt"),
        ("a\r\nSet-Cookie: x", "aSet-Cookie_ x"),
        ("evil\u202egnp.exe", "evilgnp.exe"),
        ("zero\u200bwidth\ufeff.txt", "zerowidth.txt"),
        ("a\x00b\x1b[0m", "ab[0m"),
        ("line\u2028sep\u2029.txt", "linesep.txt"),
        (".htaccess", "htaccess"),
        ("a. .", "a"),
        ("CON", "_CON"),
        ("nul.txt", "_nul.txt"),
        ("COM1.log", "_COM1.log"),
        ("console.log", "console.log"),
        ("a;b=c.txt", "a_b=c.txt"),
        ("100%.txt", "100_.txt"),
        ("\ud800\udfff.txt", "txt"),
        ("e\u0301t\u00e9", "\u00e9t\u00e9"),
        ("", "artifact"),
        ("..", "artifact"),
        ("///", "artifact"),
        ("\u202e\u200b", "artifact"),
        ("日本.txt", "日本.txt"),
    ],
)
def test_a_served_name_is_one_safe_component(stored: str, served: str) -> None:
    assert served_name(stored) == served


@pytest.mark.case("EXP-10")
def test_a_long_name_keeps_its_extension() -> None:
    assert served_name("n" * 300 + ".tar.gz") == "n" * (NAME_BYTES_MAX - 3) + ".gz"
    assert len(served_name("é" * 300 + ".csv").encode()) <= NAME_BYTES_MAX
    assert served_name("n." + "x" * 300) == ("n." + "x" * 300)[:NAME_BYTES_MAX]


def test_the_header_has_both_names_where_they_differ() -> None:
    assert content_disposition("a b.txt") == 'attachment; filename="a b.txt"'
    assert (
        content_disposition("naïve €.txt")
        == "attachment; filename=\"na_ve _.txt\"; filename*=UTF-8''na%C3%AFve%20%E2%82%AC.txt"
    )


@pytest.mark.parametrize(
    "media_type",
    [
        "text/html", "TEXT/HTML", "text/html; charset=utf-8", "application/xhtml+xml", "text/xml",
        "image/svg+xml", "application/javascript", "text/javascript", "application/xml",
        "application/pdf", "application/rss+xml", "message/rfc822", "multipart/form-data",
        "application/x-shockwave-flash", "application/java-archive",
        "text/plain\r\nX: y", "text", "", "text/plain; charset=utf-8; x=y", "a/b/c",
    ],
)  # fmt: skip
def test_what_a_browser_might_run_or_no_type_at_all_is_served_as_octets(media_type: str) -> None:
    assert served_media_type(media_type) == OCTETS


@pytest.mark.parametrize(
    "media_type",
    ["text/plain", "text/csv; charset=utf-8", "image/png", "application/zip", "application/json",
     "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", "video/mp4"],
)  # fmt: skip
def test_a_passive_type_is_served_as_it_is(media_type: str) -> None:
    assert is_media_type(media_type)
    assert served_media_type(media_type) == media_type


def test_the_headers_are_always_all_there() -> None:
    assert attachment_headers("a.txt", "text/plain", 3) == {
        "Content-Type": "text/plain",
        "Content-Length": "3",
        "Content-Disposition": 'attachment; filename="a.txt"',
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "private, no-store",
    }
