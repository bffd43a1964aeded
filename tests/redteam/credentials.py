"""Fake credentials of the kinds that a worker's environment holds: their names and their shapes.

Every value is random and made for one test; none of them opens anything.
"""

import base64
import json
import secrets
import string

_WORDS = string.ascii_letters + string.digits


def fake_environment() -> dict[str, str]:
    """Names and values of tier 0, as clouds, providers, databases and hosts give them."""
    signed = ".".join(
        _base64url(part)
        for part in (
            json.dumps({"alg": "HS256", "typ": "JWT"}).encode(),
            json.dumps({"sub": secrets.token_hex(8), "exp": 1893456000}).encode(),
            secrets.token_bytes(32),
        )
    )
    return {
        "ANTHROPIC_API_KEY": f"sk-ant-api03-{_word(80)}",
        "AWS_ACCESS_KEY_ID": "AKIA" + _word(16, string.ascii_uppercase + string.digits),
        "AWS_SECRET_ACCESS_KEY": _word(40, _WORDS + "+/"),
        "AWS_SESSION_TOKEN": _word(200, _WORDS + "+/"),
        "AZURE_CLIENT_SECRET": _word(34, _WORDS + "-_~."),
        "DATABASE_URL": f"postgres://worker:{_word(20)}@db.internal:5432/runs",
        "GITHUB_TOKEN": f"ghp_{_word(36)}",
        "GITLAB_TOKEN": f"glpat-{_word(20)}",
        "GOOGLE_API_KEY": f"AIza{_word(35)}",
        "HUGGING_FACE_HUB_TOKEN": f"hf_{_word(34)}",
        "MONGODB_URI": f"mongodb+srv://worker:{_word(18)}@cluster.internal/runs",
        "NPM_TOKEN": f"npm_{_word(36)}",
        "OPENAI_API_KEY": f"sk-proj-{_word(48)}",
        "PGPASSWORD": _word(24),
        "REDIS_URL": f"redis://:{_word(24)}@cache.internal:6379/0",
        "SBXD_SERVICE_CREDENTIAL": secrets.token_hex(32),
        "SERVICE_JWT": signed,
        "SLACK_BOT_TOKEN": f"xoxb-{_word(12, string.digits)}-{_word(24)}",
        "SSH_PRIVATE_KEY": _private_key("OPENSSH "),
        "STRIPE_SECRET_KEY": f"sk_live_{_word(24)}",
        "TLS_PRIVATE_KEY": _private_key(""),
        "VAULT_TOKEN": f"hvs.{_word(90)}",
    }


def _word(length: int, letters: str = _WORDS) -> str:
    return "".join(secrets.choice(letters) for _ in range(length))


def _base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _private_key(kind: str) -> str:
    body = base64.encodebytes(secrets.token_bytes(400)).decode()
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}-----END {kind}PRIVATE KEY-----\n"
