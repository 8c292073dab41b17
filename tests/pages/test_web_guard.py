"""The guard before every page, over real HTTP: who is let in, what is refused, what every answer carries."""

import http.client
import json
import socket

import httpx
import pytest

from proxima.pages.label import Item, Store, make_label_app
from proxima.pages.web import Site, running
from proxima.pages.web.access_guard import HEADERS, MAX_BODY

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \u202e \x00 é"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("guard") / "f.db")
    store.add_items([Item(HOSTILE, f"a {i}", HOSTILE, True, True, "m", "m") for i in range(9)])
    return store


@pytest.fixture(scope="module")
def site(store):
    site = Site()
    with running(make_label_app(store, site), site):
        yield site


@pytest.fixture
def visitor(site):
    """A browser without the cookie."""
    with httpx.Client(base_url=site.address, timeout=60) as client:
        yield client


@pytest.fixture
def member(visitor, site):
    assert visitor.get(site.url).status_code == 200
    return visitor


def answer(item=1):
    return {"annotator": "Ann", "item": item, "choice": "tie", "seconds": 1}


PATHS = [
    "/",
    "/static/base.css",
    "/static/label.js",
    "/api/state?annotator=x",
    "/api/summary",
    "/docs",
    "/openapi.json",
    "/no",
]


@pytest.mark.parametrize("path", PATHS)
def test_without_the_cookie_everything_is_refused_with_all_headers(visitor, path):
    response = visitor.get(path)
    assert response.status_code == 403
    assert {name: response.headers[name] for name in HEADERS} == HEADERS
    assert "server" not in response.headers


@pytest.mark.parametrize(
    "query", ["token=", "token=wrong", "token=é", "token=%00", "token={0}x", "token={0}&token={0}", "x=1"]
)
def test_a_wrong_token_gives_no_cookie(visitor, site, query):
    response = visitor.get("/?" + query.replace("{0}", site.token))
    assert response.status_code == 403
    assert "set-cookie" not in response.headers


def test_the_token_becomes_a_strict_cookie_and_is_in_nothing_that_is_sent_back(visitor, site):
    response = visitor.get(site.url)
    cookie = response.headers["set-cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=Strict", "Path=/", f"proxima_{site.port}="))
    assert site.token not in response.text + str(response.headers)
    assert 'content="0; url=/"' in response.text  # the browser goes on to the bare address
    page = visitor.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert {name: page.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize("value", ["", "wrong", "é", "x" * 5000])
def test_a_wrong_cookie_is_refused(site, value):
    connection = http.client.HTTPConnection("127.0.0.1", site.port)
    connection.request("GET", "/", headers={"Cookie": f"proxima_{site.port}={value}".encode()})
    assert connection.getresponse().status == 403


def test_the_token_itself_is_not_a_cookie(visitor, site):
    assert visitor.get("/", headers={"cookie": f"proxima_{site.port}={site.token}"}).status_code == 403


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""],
)
def test_a_foreign_host_is_refused_with_cookie_and_with_token(member, site, host):
    host = host.replace("{port}", str(site.port))
    for path in ("/", "/api/summary", site.url):
        assert member.get(path, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_the_names_of_this_machine_are_let_in(member, site, host):
    assert member.get("/", headers={"host": f"{host}:{site.port}"}).status_code == 200


FOREIGN = [
    {},
    {"origin": "null"},
    {"origin": "http://evil.example"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "https://{host}"},
    {"origin": "http://localhost:{port}"},  # ours, but not the address that was asked
    {"origin": "http://{host}", "sec-fetch-site": "same-site"},
    {"origin": "http://{host}", "sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("path", ["/api/answer", "/api/undo", "/", "/no"])
def test_a_change_that_does_not_come_from_the_page_is_refused(member, site, store, headers, path):
    named = {
        k: v.replace("{host}", f"127.0.0.1:{site.port}").replace("{port}", str(site.port))
        for k, v in headers.items()
    }
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert member.request(method, path, json=answer(), headers=named).status_code == 403
    assert store.counts()[1] == 0


def test_a_change_from_the_page_passes(member, site, store):
    headers = {"origin": site.address, "sec-fetch-site": "same-origin"}
    response = member.post("/api/answer", json=answer(store.handle(1)), headers=headers)
    assert response.status_code == 200
    last = response.json()["last"]
    assert (
        member.post("/api/undo", json={"annotator": "Ann", "answer": last}, headers=headers).status_code
        == 200
    )
    assert store.counts()[1] == 0


def test_a_large_body_is_refused_announced_or_not(member, site):
    headers = {"origin": site.address}
    assert member.post("/api/answer", content=b"x" * (MAX_BODY + 1), headers=headers).status_code == 413
    chunks = (b"x" * 1000 for _ in range(MAX_BODY // 1000 + 2))
    assert member.post("/api/answer", content=chunks, headers=headers).status_code == 413
    assert member.post("/api/answer", content=b"x" * MAX_BODY, headers=headers).status_code in (400, 422)


BODIES = [
    "",
    "{",
    "[]",
    "null",
    "[" * 50_000,
    "{}",
    '{"annotator": "A", "item": 1, "choice": "3"}',
    '{"annotator": "A", "item": "1", "choice": "1"}',
    '{"annotator": "A", "item": true, "choice": "1"}',
    '{"annotator": "A", "item": 999, "choice": "1"}',
    '{"annotator": "A", "item": 1e400, "choice": "1"}',
    '{"annotator": "A", "item": 1, "choice": "1", "seconds": NaN}',
    '{"annotator": "A", "item": 1, "choice": "1", "seconds": "1"}',
    '{"annotator": "", "item": 1, "choice": "1"}',
    '{"annotator": "a\\u0000b", "item": 1, "choice": "1"}',
    '{"annotator": "\\ud800", "item": 1, "choice": "1"}',
    '{"annotator": ["A"], "item": 1, "choice": "1"}',
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_body_of_the_wrong_form_is_an_error_in_words_and_stores_nothing(member, site, store, body):
    response = member.post(
        "/api/answer", content=body, headers={"origin": site.address, "content-type": "application/json"}
    )
    assert response.status_code in (400, 422)
    assert response.json()["error"]
    assert store.counts()[1] == 0


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/guard.py",
        "/static//etc/passwd",
        "/static/",
    ],
)
def test_no_path_leads_out_of_the_static_files(member, site, path):
    connection = http.client.HTTPConnection("127.0.0.1", site.port)  # it sends the path as it is
    cookie = "; ".join(f"{name}={value}" for name, value in member.cookies.items())
    connection.request("GET", path, headers={"Cookie": cookie})
    response = connection.getresponse()
    assert response.status in (404, 307)
    assert b"import" not in response.read()


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_there_are_no_documentation_routes(member, path):
    assert member.get(path).status_code == 404


def test_hostile_text_comes_back_as_json_that_no_browser_runs(member):
    response = member.get("/api/state?annotator=Ann")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.json()["item"]["prompt"] == HOSTILE
    error = member.get("/api/state", params={"annotator": "<script>" * 20})
    assert (error.status_code, error.headers["content-type"]) == (400, "application/json")


def test_the_page_asks_nothing_of_other_servers_and_has_no_inline_script(member):
    page = member.get("/").text
    texts = [page] + [
        member.get(f"/static/{name}").text for name in ("base.css", "base.js", "label.css", "label.js")
    ]
    assert not any("http://" in text or "https://" in text or "innerHTML" in text for text in texts)
    assert "<script>" not in page
    assert " style=" not in page
    assert " on" not in page.replace(" on ", "")


def test_a_failure_inside_the_app_still_carries_the_headers(store):
    site = Site()
    app = make_label_app(store, site)

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("secret detail")

    with running(app, site), httpx.Client(base_url=site.address, timeout=60) as client:
        client.get(site.url)
        response = client.get("/broken")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert {name: response.headers[name] for name in HEADERS} == HEADERS


def test_a_web_socket_is_refused(site):
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        lines = (
            f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\nUpgrade: websocket\r\nConnection: "
            "Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        raw.sendall(lines.encode())
        assert b" 403 " in raw.recv(200)


def test_two_pages_on_one_machine_have_keys_of_their_own(store):
    one, two = Site(), Site()
    assert one.token != two.token
    assert one.guard.cookie != two.guard.cookie
    one.socket.close()
    two.socket.close()


def test_a_taken_port_and_a_wildcard_host_are_errors_in_words(site):
    with pytest.raises(ValueError, match=f"port {site.port}: .*try --port 0"):
        Site(port=site.port)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match="every address"):
            Site(host)
    with pytest.raises(ValueError, match="cannot listen"):
        Site("192.0.2.1")
    with pytest.raises(ValueError, match="port"):
        Site(port=70000)


def test_json_of_the_summary_can_be_read_strictly(member):
    text = member.get("/api/summary").text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
