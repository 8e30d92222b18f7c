"""HTTP clients of other languages can rank and send engagements with their default settings."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.jars import COMPILER_JARS, find_java
from infra.prepare import compile_java
from roostream.errors import RoostreamError
from tests.serving.live_serving import LiveServing, run_live_serving
from tests.serving.serving_cases import BODY, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeRows

CLICK = {"request_id": "r-1", "user_id": 17, "item_id": 8, "action": "click"}
JSON = "application/json"

NODE = """
const [url, rank, click] = process.argv.slice(1)
const headers = {'content-type': 'application/json'}
for (const [path, body] of [['/v1/rank', rank], ['/v1/engagements', click]]) {
  const answer = await fetch(url + path, {method: 'POST', headers, body})
  await answer.text()
  console.log(answer.status)
}
"""
GO = """
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

func main() {
	for i, path := range []string{"/v1/rank", "/v1/engagements"} {
		answer, err := http.Post(os.Args[1]+path, "application/json", strings.NewReader(os.Args[2+i]))
		if err != nil {
			panic(err)
		}
		io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		fmt.Println(answer.StatusCode)
	}
}
"""
JAVA = """
import java.net.URI;
import java.net.http.*;

public class Client {
    public static void main(String[] given) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        String[] paths = {"/v1/rank", "/v1/engagements"};
        for (int i = 0; i < paths.length; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(given[0] + paths[i]))
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(given[1 + i])).build();
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).statusCode());
        }
    }
}
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServing]:
    with run_live_serving(build_serving(tmp_path / "home", FakeRows(SCHEMA))) as running:
        yield running


def check_rank_and_engage(live: LiveServing, *command: str) -> None:
    bodies = (json.dumps(BODY), json.dumps(CLICK))
    result = subprocess.run(
        [*command, live.url, *bodies], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout.split() == ["200", "200"], result.stdout + result.stderr
    assert [record.topic for record in live.serving.records()] == ["impressions", "engagements"]


def find_program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_curl_with_http2_ranks_and_engages(live: LiveServing) -> None:
    post = (
        find_program("curl"),
        "--http2",
        "--silent",
        "-H",
        f"content-type: {JSON}",
        "-w",
        "\n%{http_code}",
    )
    for path, body in (("/v1/rank", BODY), ("/v1/engagements", CLICK)):
        command = [*post, live.url + path, "-d", json.dumps(body)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert result.stdout.endswith("\n200"), result.stdout
    assert [record.topic for record in live.serving.records()] == ["impressions", "engagements"]


def test_node_ranks_and_engages(live: LiveServing) -> None:
    check_rank_and_engage(live, find_program("node"), "--input-type=module", "--eval", NODE)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_go_ranks_and_engages(live: LiveServing, tmp_path: Path) -> None:
    (tmp_path / "client.go").write_text(GO)
    client = str(tmp_path / "client")
    subprocess.run(
        [find_program("go"), "build", "-o", client, "client.go"], cwd=tmp_path, check=True, timeout=600
    )
    check_rank_and_engage(live, client)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_http_client_of_the_jdk_ranks_and_engages(live: LiveServing, tmp_path: Path) -> None:
    """By default, this client asks for an upgrade to HTTP/2."""
    try:
        java = str(find_java())
    except RoostreamError as error:
        pytest.skip(str(error))
    if not any(COMPILER_JARS.glob("*.jar")):
        pytest.skip("the Java compiler is not fetched; run `make setup`")
    (tmp_path / "Client.java").write_text(JAVA)
    compile_java([tmp_path / "Client.java"], [], tmp_path)
    check_rank_and_engage(live, java, "-cp", str(tmp_path), "Client")
