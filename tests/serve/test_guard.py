"""Who may ask: this machine alone, who has the token, or everybody."""

import pytest

from genesis.base.errors import UserError
from genesis.serve.errors import ApiError
from genesis.serve.guard import Guard

TOKEN = "a-token-of-some-length"
LOCAL = ("localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000")
OTHER = ("", "example.org", "example.org:8000", "localhost.example.org", "127.0.0.1.example.org", "10.0.0.1", "[bad")


def status(check, headers):
    try:
        check(headers)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize("host", LOCAL)
def test_this_machines_own_names_are_answered(host):
    assert status(Guard().check_site, {"Host": host}) == 200
    assert status(Guard().check_site, {"Host": host, "Origin": f"http://{host}"}) == 200


@pytest.mark.parametrize("host", OTHER)
def test_a_name_that_was_made_to_point_here_is_refused(host):
    assert status(Guard().check_site, {"Host": host}) == 403


@pytest.mark.parametrize(
    "origin", ["http://example.org", "null", "", "http://localhost:9", "http://localhost:8000.a.b"]
)
def test_another_sites_page_is_refused(origin):
    assert status(Guard().check_site, {"Host": "localhost:8000", "Origin": origin}) == 403


@pytest.mark.parametrize("guard", [Guard(TOKEN), Guard(is_public=True)])
def test_a_server_with_a_token_or_for_everybody_is_asked_by_any_name(guard):
    assert status(guard.check_site, {"Host": "example.org", "Origin": "https://other.org"}) == 200


@pytest.mark.parametrize(
    "value", ["", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", "Bearer \udcff\u00e9"]
)
def test_who_does_not_bring_the_token_is_refused(value):
    assert status(Guard(TOKEN).check_token, {"Authorization": value}) == 401
    assert status(Guard(TOKEN).check_token, {}) == 401


def test_the_token_opens():
    assert status(Guard(TOKEN).check_token, {"Authorization": f"Bearer {TOKEN}"}) == 200
    assert status(Guard(TOKEN).check_token, {"Authorization": f"bearer  {TOKEN}"}) == 200
    assert status(Guard().check_token, {}) == 200


@pytest.mark.parametrize("token", ["short", "\u00e9" * 20, "a b\n" * 10])
def test_a_token_that_is_weak_or_cannot_be_sent_is_refused(token):
    with pytest.raises(UserError, match="give at least 16"):
        Guard(token)


def test_a_public_server_has_no_token():
    with pytest.raises(UserError, match="either --token or --public"):
        Guard(TOKEN, is_public=True)


def test_only_a_public_page_may_stand_in_a_frame():
    assert "frame-ancestors 'none'" in Guard().answer_headers()["Content-Security-Policy"]
    assert "frame-ancestors" not in Guard(is_public=True).answer_headers()["Content-Security-Policy"]
