"""Stand-ins for the images on which ours and infra/compose.yaml are based, with the same names, for machines
that reach no registry of images. They are built from packages of Debian and Maven, and from uv's wheel.

    python -m tests.containers.base_images    # as root; needs Docker, debootstrap and `make setup-dev`

They differ from the originals: the CPython that runs this program, Debian's Redis, and Kafka without its
shell scripts. Kafka's own class `KafkaDockerWrapper` reads the environment, as in the original. An image that
exists is kept.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.jars import KAFKA_JARS, require_jars

SLIM, FULL = "docker.io/library/python:3.11.13-slim-bookworm", "docker.io/library/python:3.11.13-bookworm"
UV, REDIS, KAFKA = (
    "ghcr.io/astral-sh/uv:0.13.8",
    "docker.io/library/redis:7.4",
    "docker.io/apache/kafka:4.2.0",
)
_PATH = "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSTALL = "RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends"

_FULL = f"""
FROM {SLIM}
COPY certificates /etc/ssl/certs/ca-certificates.crt
{_INSTALL} build-essential
COPY certificates /etc/ssl/certs/ca-certificates.crt
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
"""
_REDIS = f"""
FROM {SLIM}
{_INSTALL} redis-server && install -d -o redis -g redis /data
RUN printf '#!/bin/sh\\nexec "$@" --protected-mode no\\n' > /usr/local/bin/start \\
 && chmod +x /usr/local/bin/start
VOLUME /data
WORKDIR /data
USER redis
ENTRYPOINT ["start"]
CMD ["redis-server"]
"""
_KAFKA = f"""
FROM {SLIM}
RUN mkdir -p /usr/share/man/man1
{_INSTALL} openjdk-17-jre-headless libyaml-snake-java
RUN useradd --uid 1000 appuser \\
 && install -d -o appuser /var/lib/kafka/data /mnt/shared/config /opt/kafka/config
COPY kafka /opt/kafka/libs
COPY --chmod=755 run /etc/kafka/docker/run
COPY --chmod=755 kafka-broker-api-versions.sh /opt/kafka/bin/
RUN touch /etc/kafka/docker/server.properties \\
 && echo 'Configuration: {{Loggers: {{Root: {{level: WARN}}}}}}' > /etc/kafka/docker/log4j2.yaml
USER appuser
VOLUME ["/var/lib/kafka/data", "/mnt/shared/config"]
CMD ["/etc/kafka/docker/run"]
"""
_RUN = """#!/bin/bash
set -e
export CLUSTER_ID="${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}"
printed=$(java -cp '/opt/kafka/libs/*:/usr/share/java/snakeyaml.jar' kafka.docker.KafkaDockerWrapper setup \\
  --default-configs-dir /etc/kafka/docker --mounted-configs-dir /mnt/shared/config \\
  --final-configs-dir /opt/kafka/config 2>&1) || grep -q "already formatted" <<< "$printed" ||
  { echo "$printed"; exit 1; }
exec java -Xmx512m -cp '/opt/kafka/libs/*' kafka.Kafka /opt/kafka/config/server.properties
"""
_VERSIONS = """#!/bin/bash
exec java -Xmx64m -cp '/opt/kafka/libs/*' org.apache.kafka.tools.BrokerApiVersionsCommand "$@"
"""


def make() -> None:
    """Build the images that the engine lacks. Raises subprocess.CalledProcessError: a command failed."""
    with tempfile.TemporaryDirectory(prefix="roostream-images-") as name:
        folder = Path(name)
        if not _exists(SLIM):
            _make_slim(folder / "root")
        if not _exists(UV):
            wheel, uv = folder / "wheel", shutil.which("uv")
            wheel.mkdir()
            assert uv, "uv is not on PATH: run make setup-dev"
            shutil.copy(uv, wheel / "uv")
            _build(UV, "FROM scratch\nCOPY uv /uv\n", wheel)
        context = folder / "context"
        context.mkdir()
        certificates = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
        shutil.copy(certificates, context / "certificates")
        _build(FULL, _FULL, context)
        _build(REDIS, _REDIS, context)
        require_jars()
        shutil.copytree(KAFKA_JARS, context / "kafka")
        (context / "run").write_text(_RUN, encoding="utf-8")
        (context / "kafka-broker-api-versions.sh").write_text(_VERSIONS, encoding="utf-8")
        _build(KAFKA, _KAFKA, context)


def _exists(image: str) -> bool:
    return not subprocess.run(
        ("docker", "image", "inspect", image), capture_output=True, check=False
    ).returncode


def _make_slim(root: Path) -> None:
    """Debian's smallest system, with CPython in /usr/local."""
    packages = (
        "--include=ca-certificates,netbase,libbz2-1.0,libffi8,liblzma5,libreadline8,libsqlite3-0,libssl3"
    )
    subprocess.run(("debootstrap", "--variant=minbase", packages, "bookworm", str(root)), check=True)
    packages_of_python = shutil.ignore_patterns("site-packages", "__pycache__")
    for part in ("bin", "include", "lib"):
        shutil.copytree(
            Path(sys.base_prefix) / part,
            root / "usr/local" / part,
            symlinks=True,
            ignore=packages_of_python,
            dirs_exist_ok=True,
        )
    (root / "usr/local/lib/python3.11/site-packages").mkdir()
    subprocess.run(("chroot", str(root), "ldconfig"), check=True)
    with subprocess.Popen(("tar", "-C", str(root), "-c", "."), stdout=subprocess.PIPE) as tar:
        subprocess.run(("docker", "import", "--change", _PATH, "-", SLIM), stdin=tar.stdout, check=True)


def _build(image: str, dockerfile: str, context: Path) -> None:
    if not _exists(image):
        command = ("docker", "build", "--quiet", "--tag", image, "--file", "-", str(context))
        subprocess.run(command, input=dockerfile, text=True, check=True)


if __name__ == "__main__":
    make()
    print("every base image is there", file=sys.stderr)
