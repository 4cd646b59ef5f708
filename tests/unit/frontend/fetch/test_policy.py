"""URLs that a policy refuses before anything is looked up or sent."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from yarl import URL

from frontend.media_limits import policy as policy_module
from frontend.media_limits.policy import MAX_URL_CHARACTERS, FetchPolicy, RefusedError, parse_url
from tests.odd_urls import ODD


@pytest.mark.parametrize("url", ODD)
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(RefusedError):
        FetchPolicy().check_url(parse_url(url))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://example.com:8443/a/b.png?signature=x%2Fy#part",
        "HTTP://EXAMPLE.COM./x",
        "http://user:secret@example.com/",
        "http://bücher.example/",
        "http://xn--bcher-kva.example/",
        "http://under_score.example/",
        "http://3com.com/",
        "http://1.2.3.4.example/",
        "http://8.8.8.8/",
        "http://[2606:4700:4700::1111]:8080/",
        "http://example.com/a picture.png",
        "http://example.com#@127.0.0.1/",
        "http://127.0.0.1:80@example.com/",
        "http://localhost/",  # its address is what will be refused
    ],
)
def test_plain_urls_are_not(url: str) -> None:
    FetchPolicy().check_url(parse_url(url))


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("/a.png?Credential=AK%2F20260101%2Feu&Date=2026-01-01T00%3A00%3A00Z", None),
        ("/sig/plain/http%3A%2F%2Forigin%2Fcat%7E1.png", None),
        ("/a%2Fb.png?sig=x%2By%3D&z=%41%zz%", None),
        ("/a//b/./../c;v=1,2?a=b+c&a=%20&=&&x=[1]|2'!$", None),
        ("/?redirect=http://a.com/?b=c", None),
        ("/a b.png?q=a b", "/a%20b.png?q=a%20b"),
        ('/ä"<>`{}^\\.png?ß=日本', "/%C3%A4%22%3C%3E%60%7B%7D%5E%5C.png?%C3%9F=%E6%97%A5%E6%9C%AC"),
        ("/x#part?no", "/x"),
        ("?q=1", "/?q=1"),
        ("", "/"),
        ("/x   ", "/x"),
    ],
)
def test_addresses_are_asked_for_as_they_are_written(text: str, sent: str | None) -> None:
    for site in ("http://example.com:8080", "https://user:pass@example.com"):
        url = parse_url(site + text)
        assert url.raw_path_qs == (text if sent is None else sent)
        assert (url.raw_host, url.scheme) == ("example.com", site.partition(":")[0])
        redirected = FetchPolicy().redirect(parse_url("http://a.com/x?y"), site + text)
        assert redirected.raw_path_qs == url.raw_path_qs


@pytest.mark.parametrize(
    ("host", "sent"),
    [("bücher.example", "xn--bcher-kva.example"), ("EXAMPLE.com", "example.com")],
)
def test_hosts_are_what_browsers_make_of_them(host: str, sent: str) -> None:
    assert parse_url(f"http://{host}/%7E").raw_host == sent


def test_private_addresses_can_be_allowed_but_not_odd_spellings() -> None:
    policy = FetchPolicy(allow_private=True)
    for url in ("http://127.0.0.1:8000/", "http://[::1]/", "http://10.0.0.1/"):
        policy.check_url(URL(url))
    for url in ("http://0x7f000001/", "http://127.1/", "http://[fe80::1%25eth0]/"):
        with pytest.raises(RefusedError):
            policy.check_url(URL(url))


def test_our_own_public_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "is_own", lambda address: str(address) == "8.8.8.8")
    assert not FetchPolicy().allows_address("8.8.8.8")
    assert FetchPolicy().allows_address("8.8.4.4")


@pytest.mark.parametrize("address", ["", "localhost", "127.1", "fe80::1%lo", "8.8.8.8."])
def test_only_canonical_addresses_are_connected_to(address: str) -> None:
    assert not FetchPolicy(allow_private=True).allows_address(address)


@pytest.mark.parametrize(
    ("domain", "host", "allowed"),
    [
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.COM", True),
        ("Example.COM.", "example.com", True),
        ("example.com", "example.com.", True),
        ("example.com", "a.example.com", False),
        ("example.com", "notexample.com", False),
        ("example.com", "example.com.evil.com", False),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "notexample.com", False),
        ("*.example.com", "a.example.com.evil.com", False),
        ("bücher.example", "xn--bcher-kva.example", True),
        ("8.8.8.8", "8.8.8.8", True),
        ("2606:4700::1", "[2606:4700:0::1]", True),
    ],
)
def test_allowed_domains(domain: str, host: str, allowed: bool) -> None:
    policy = FetchPolicy(allowed_domains=(domain,))
    url = URL(f"http://{host}/")
    if allowed:
        policy.check_url(url)
    else:
        with pytest.raises(RefusedError, match="allowed domains"):
            policy.check_url(url)


def test_an_allowed_domain_is_no_way_to_a_private_address() -> None:
    with pytest.raises(RefusedError, match="not public"):
        FetchPolicy(allowed_domains=("127.0.0.1",)).check_url(URL("http://127.0.0.1/"))


@pytest.mark.parametrize("domain", ["", "*", "*.", "http://example.com", "exa mple.com", "a..b"])
def test_what_is_no_domain_is_named_at_start(domain: str) -> None:
    with pytest.raises(ValidationError, match="is not a host"):
        FetchPolicy(allowed_domains=(domain,))


def test_the_local_root_has_to_exist(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert FetchPolicy(local_root=link).local_root == tmp_path
    with pytest.raises(ValidationError, match="not a directory"):
        FetchPolicy(local_root=tmp_path / "none")


@pytest.mark.parametrize(
    ("start", "location", "end"),
    [
        ("http://a.com/x/y", "z", "http://a.com/x/z"),
        ("http://a.com/x", "/z?q", "http://a.com/z?q"),
        ("http://a.com/x", "//b.com/z", "http://b.com/z"),
        ("http://a.com/x", "https://b.com/", "https://b.com/"),
        ("https://a.com/x", "//b.com/", "https://b.com/"),
    ],
)
def test_redirects_that_are_followed(start: str, location: str, end: str) -> None:
    assert FetchPolicy().redirect(URL(start), location) == URL(end)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "//169.254.169.254/latest",
        "http://0x7f.1/",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "gopher://b.com/",
        "http://b.com:0/",
        "http://[::ffff:10.0.0.1]/",
        "http://b.com\\@127.0.0.1/",
        "https://a.com:port/",
        "x" * (MAX_URL_CHARACTERS + 1),
    ],
)
def test_redirects_that_are_not(location: str) -> None:
    with pytest.raises(RefusedError):
        FetchPolicy().redirect(URL("http://a.com/x"), location)


def test_no_redirect_drops_encryption() -> None:
    with pytest.raises(RefusedError, match="encryption"):
        FetchPolicy().redirect(URL("https://a.com/x"), "http://a.com/x")
