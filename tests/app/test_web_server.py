"""The local page over HTTP: from a table to a report, and nothing for whoever lacks the token or names another host."""

import html
import http.client
import io
import json
import re
import socket
import threading
import time
import zipfile
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import pytest

from mooring.app import web_server
from mooring.app.jobs import FAILED, Job, run_job
from mooring.core.errors import RequestError
from tests.app.tables import table

TOKEN = "a-token"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app")
    (folder / "tables").mkdir()
    (folder / "runs").mkdir()
    return folder


class Answer:
    def __init__(self, answer):
        self.status_code, self.headers, self.content = answer.status, answer.headers, answer.read()
        self.text = self.content.decode(errors="replace")

    def json(self):
        return json.loads(self.content)


class Client:
    """Asks a server on this machine; no answer is followed anywhere."""

    def __init__(self, port):
        self.port = port

    def ask(self, method, path, body=None, headers=None):
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        there.request(method, path, body, headers or {})
        answer = Answer(there.getresponse())
        there.close()
        return answer

    def get(self, path, headers=None):
        return self.ask("GET", path, headers=headers)

    def post(self, path, content, headers=None):
        return self.ask("POST", path, content, headers)


@pytest.fixture(scope="module")
def client(folder):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        running = web_server.make_server(web_server.build_app(folder, TOKEN))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        yield Client(listening.getsockname()[1])
        running.should_exit = True
        thread.join()


def give(client, data, name="sales.csv"):
    return client.post(f"/{TOKEN}/tables?name={name}", data)


def test_without_the_token_nothing_is_told(client):
    for path in ("/", "/a-toke/", "/a-token-2/", "/static/app.js", "/runs/x", f"/x/{TOKEN}/"):
        answer = client.get(path)
        assert answer.status_code == 403 and TOKEN not in answer.text
    assert client.post("/tables?name=x.csv", b"a,b\n1,2\n").status_code == 403
    assert client.get(f"/{TOKEN}/").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "10.0.0.1"])
def test_another_host_is_refused(client, host):
    assert client.get(f"/{TOKEN}/", headers={"Host": host}).status_code == 400
    assert client.post(f"/{TOKEN}/tables?name=x.csv", b"a\n1\n", headers={"Host": host}).status_code == 400


def test_every_answer_forbids_strangers(client):
    for path in ("/", "/static/app.js", "/runs/none"):
        headers = client.get(f"/{TOKEN}{path}").headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"


def test_names_lead_nowhere_else(client, folder):
    (folder.parent / "secret.csv").write_text("a,b\n1,2\n")
    lost = client.get(f"/{TOKEN}/runs/none")
    assert lost.status_code == 422 and 'href="../"' in lost.text and "no run called &#39;none&#39;" in lost.text
    for name in ("..%2fsecret.csv", "%2e%2e/secret.csv", "..", "secret.csv"):
        assert client.get(f"/{TOKEN}/tables/{name}").status_code in (404, 422)
    reply = give(client, table().to_csv(index=False), "..%2f..%2fout.csv").json()
    assert reply == {"next": "tables/out.csv"} and (folder / "tables" / "out.csv").is_file()


def test_what_is_no_table_is_refused_in_a_sentence_and_not_kept(client, folder):
    answer = give(client, b"\x00\x01\x02", "noise.csv")
    assert answer.status_code == 422 and "noise.csv" in answer.json()["error"]
    assert not (folder / "tables" / "noise.csv").exists()


def test_from_a_table_to_a_report(client, folder):
    reply = give(client, table().to_csv(index=False)).json()
    page = client.get(f"/{TOKEN}/{reply['next']}").text
    assert "<option selected>shop</option>" in page and "<option selected>sold</option>" in page
    assert "To fix" not in page and "disabled" not in page  # clients of few rows take part
    page = client.get(f"/{TOKEN}/{reply['next']}?client=shop&target=sold&drop_small=on").text
    assert "Shop-tiny" in page and "it is left out" in page and "disabled" not in page
    asked = {"client": "shop", "target": "sold", "drop_small": True}
    reply = client.post(f"/{TOKEN}/{reply['next']}/advise", json.dumps(asked)).json()
    at = f"/{TOKEN}/{reply['next'].removeprefix('../')}"
    state = {"state": "waiting"}
    while state["state"] in ("waiting", "running"):
        time.sleep(0.1)
        state = client.get(f"{at}/state").json()
    assert state["state"] == "done", state
    assert "of 6 clients" in client.get(at).text
    report = client.get(f"{at}/report")
    assert report.text == (folder / "runs" / at.rsplit("/", 1)[1] / "report.html").read_text()
    coefficients = pd.read_csv(io.BytesIO(client.get(f"{at}/coefficients").content))
    assert set(coefficients["client"]) == {f"Shop-{i}" for i in range(6)}
    assert len(pd.read_csv(io.BytesIO(client.get(f"{at}/clients").content))) == 6
    names = zipfile.ZipFile(io.BytesIO(client.get(f"{at}/run").content)).namelist()
    assert {name.split("/")[1] for name in names} >= {"run.toml", "models.safetensors", "report.html"}
    assert client.get(f"{at}/run.toml").status_code == 404
    assert at.rsplit("/", 1)[1] in client.get(f"/{TOKEN}/").text


@pytest.mark.parametrize("body", ["", "{", "[]", '"x"', "{}", '{"client": 5, "target": "y"}', "[" * 5000])
def test_a_request_that_is_not_json_is_refused_in_a_sentence(body, client, folder):
    reply = give(client, table().to_csv(index=False)).json()
    answer = client.post(f"/{TOKEN}/{reply['next']}/advise", body)
    assert answer.status_code == 422 and ("the request" in answer.text or "client must be a text" in answer.text)


def test_what_goes_wrong_on_the_way_is_told_in_a_sentence(tmp_path, capsys):
    def wrong(error):
        def work(job):
            raise error

        job = Job(tmp_path, work)
        run_job(job)
        return job

    job = wrong(RequestError("column 'x' is missing."))
    assert (job.state, job.error) == (FAILED, "column 'x' is missing.") and capsys.readouterr().err == ""
    job = wrong(ZeroDivisionError("oh"))
    assert (job.state, job.error) == (FAILED, "unexpected ZeroDivisionError: oh")
    assert "Traceback" in capsys.readouterr().err


def test_it_listens_on_this_machine_only(tmp_path, monkeypatch):
    bound, addresses = [], []

    class Server:
        def __init__(self, config):
            pass

        def run(self, sockets):
            bound.extend(one.getsockname() for one in sockets)

    monkeypatch.setattr(web_server.uvicorn, "Server", Server)
    web_server.serve(tmp_path / "kept", 0, addresses.append)
    web_server.serve(tmp_path / "kept", 0, addresses.append)
    assert [host for host, _ in bound] == ["127.0.0.1"] * 2
    first, second = (address.split("/")[3] for address in addresses)
    assert first != second and len(first) >= 24
    assert addresses[0].startswith(f"http://127.0.0.1:{bound[0][1]}/")


def test_guesses_of_columns():
    from mooring.data.role_guesses import describe_columns, guess_client_columns, guess_target_columns

    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": np.arange(60),
            "colour": rng.choice(["red", "blue"], 60),
            "hospital_id": np.repeat(np.arange(6), 10),
            "weight": rng.normal(size=60),
            "outcome": rng.choice(["yes", "no"], 60),
            "when": pd.date_range("2024-01-01", periods=60).astype(str),
        }
    )
    found = describe_columns(frame)
    assert guess_client_columns(found, 60) == ["hospital_id", "colour", "outcome"]
    assert guess_target_columns(found, "hospital_id")[0] == "outcome"
    assert [(c.name, c.kind, c.values, c.missing) for c in found[:3]] == [
        ("id", "number", 60, 0),
        ("colour", "category", 2, 0),
        ("hospital_id", "number", 6, 0),
    ]


def upload(client, frame, name):
    content = frame.to_csv(index=False).encode()
    return client.post(f"/{TOKEN}/tables?name={name}", content).json()["next"]


def test_columns_are_left_out_by_a_tick_or_a_cure(client, folder):
    frame = table().assign(copy=lambda f: f["sold"])
    page = f"/{TOKEN}/{upload(client, frame, 'leak.csv')}"
    text = client.get(f"{page}?client=shop&target=sold").text
    assert "To fix (1)" in text and "Leave out copy" in text and "disabled" in text
    cure = html.unescape(text.split('class="cure" href="')[1].split('"')[0])
    cured = client.get(page + cure).text
    assert "To fix" not in cured and 'value="copy" aria-label="use copy">' in cured  # its box is not ticked
    reply = client.post(f"{page}/advise", json.dumps({"client": "shop", "target": "sold", "drop": "copy"}))
    assert reply.status_code == 422 and "list of texts" in reply.json()["error"]


def test_a_header_row_is_chosen_on_the_page(client, folder):
    text = "a report of sales,,\n" + table().to_csv(index=False)
    path = client.post(f"/{TOKEN}/tables?name=whole.csv", table().to_csv(index=False).encode()).json()["next"]
    (folder / path).write_text(text)
    page = client.get(f"/{TOKEN}/{path}?client=shop&target=sold&header_row=2")
    assert page.status_code == 200 and 'name="header_row" inputmode="numeric" value="2"' in page.text
    wrong = client.get(f"/{TOKEN}/{path}?header_row=two")
    assert wrong.status_code == 422 and "a whole number from 1 on" in wrong.text


def test_runs_are_renamed_and_deleted(client, folder):
    for name in ("first", "second"):
        (folder / "runs" / name).mkdir()
        (folder / "runs" / name / "run.toml").write_text("")
        (folder / "runs" / name / "models.safetensors").write_bytes(b"")
    home = client.get(f"/{TOKEN}/").text
    assert 'data-run="first" data-action="rename"' in home and 'data-run="first" data-action="delete"' in home
    taken = client.post(f"/{TOKEN}/runs/first/rename", json.dumps({"name": "second"}))
    assert taken.status_code == 422 and "already" in taken.json()["error"]
    away = client.post(f"/{TOKEN}/runs/first/rename", json.dumps({"name": "../away"}))
    assert away.status_code == 422 and (folder / "runs" / "first").is_dir()
    assert client.post(f"/{TOKEN}/runs/first/rename", json.dumps({"name": "third"})).status_code == 200
    assert (folder / "runs" / "third").is_dir() and not (folder / "runs" / "first").exists()
    for name in ("second", "third"):
        assert client.post(f"/{TOKEN}/runs/{name}/delete", "").status_code == 200
        assert not (folder / "runs" / name).exists()
    assert client.post(f"/{TOKEN}/runs/third/delete", "").status_code == 422


@pytest.mark.parametrize(("method", "path"), [("POST", "nowhere"), ("POST", "runs/x"), ("GET", "nowhere/at/all")])
def test_malformed_requests_get_a_sentence(method, path, client):
    answer = client.ask(method, f"/{TOKEN}/{path}", "{" if method == "POST" else None)
    assert answer.status_code in (404, 405)
    text = answer.json()["error"] if method == "POST" else answer.text
    assert text.endswith(".") and len(text.split()) > 3


def follow(client, page, label):
    """The page after a click on a cure of that label."""
    text = client.get(page).text
    links = dict(re.findall(r'class="cure" href="([^"]*)">([^<]*)<', text))
    address = next(address for address, name in links.items() if html.unescape(name) == label)
    return page.partition("?")[0] + html.unescape(address)


def test_buttons_cure_findings_one_after_another_and_can_be_undone(client, folder):
    rng = np.random.default_rng(0)
    frame = table().assign(weather=rng.choice(["sunny", "rainy"], 184), stock=rng.normal(20, 2, 184).round(1))
    frame.loc[3, "weather"], frame.loc[[7, 19, 33], "stock"] = "suny", -999
    frame["visits"] = rng.integers(5, 60, 184).astype(str)
    frame.loc[11, "visits"] = "k.A."
    frame = pd.concat([frame, frame.iloc[:3]])
    page = f"/{TOKEN}/{upload(client, frame, 'dirt.csv')}?client=shop&target=sold"
    labels = ["Read k.A. as missing", "Read suny as sunny", "Read -999 as missing", "Leave repeated rows out"]
    for label in labels:
        page = follow(client, page, label)
    text = client.get(page).text
    applied = re.findall(r"<li>([^<]*) <a class=\"cure\" href=\"[^\"]*\">Undo", text)
    assert sorted(applied) == sorted(labels)
    assert "To fix" not in text and "Warnings" not in text
    options = json.loads(html.unescape(re.search(r"data-options='([^']*)'", text).group(1)))
    assert options["na"] == ["k.A.", "-999"] and options["merge_levels"] == ["suny=sunny"] and options["drop_repeats"]
    assert "To fix (1)" in client.get(follow(client, page, "Undo")).text  # the first: k.A. is a text again


def test_another_target_keeps_the_former_one_as_a_column(client, folder):
    page = f"/{TOKEN}/{upload(client, table(), 'roles.csv')}"
    text = client.get(f"{page}?client=shop&target=rain").text
    uses = [("use", name) for name in re.findall(r'name="use" value="([^"]*)"', text)]
    text = client.get(f"{page}?{urlencode([('client', 'shop'), ('target', 'sold'), ('chosen', 1), *uses])}").text
    assert 'value="rain" aria-label="use rain" checked>' in text


def test_small_clients_take_part_and_the_page_says_so(client, folder):
    page = f"/{TOKEN}/{upload(client, table(), 'small.csv')}?client=shop&target=sold"
    assert "1 of 7 clients have fewer than 5 rows; they take part" in client.get(page).text
    assert "1 of 7 clients" not in client.get(page + "&drop_small=on").text


@pytest.fixture(scope="module")
def advised(client, folder):
    frame = table()
    frame = frame[frame["shop"].isin(["Shop-0", "Shop-1", "Shop-2"])]
    page = f"/{TOKEN}/{upload(client, frame, 'base.csv')}"
    reply = client.post(f"{page}/advise", json.dumps({"client": "shop", "target": "sold"})).json()
    run = reply["next"].rpartition("/")[2]
    wait_for(client, run)
    return run


def wait_for(client, run):
    while client.get(f"/{TOKEN}/runs/{run}/state").json()["state"] not in ("done", "failed"):
        time.sleep(0.1)
    assert client.get(f"/{TOKEN}/runs/{run}/state").json()["error"] == ""


def test_a_file_is_predicted_after_the_report(client, advised, folder):
    rows = table().drop(columns="sold")
    rows = rows[rows["shop"].isin(["Shop-1", "Shop-5"])]
    address = f"/{TOKEN}/runs/{advised}/predict?name=new%20rows.csv"
    reply = client.post(f"{address}&format=xlsx&interval=on", rows.to_csv(index=False)).json()
    assert "60 rows predicted." in reply["notes"] and any("unknown client, 'Shop-5'" in note for note in reply["notes"])
    answer = client.get(f"/{TOKEN}/runs/{reply['file']}")
    frame = pd.read_excel(io.BytesIO(answer.content))
    assert len(frame) == 60 and (frame["sold_low"] < frame["sold"]).all() and "attachment" in str(answer.headers)
    assert reply["name"] in client.get(f"/{TOKEN}/runs/{advised}").text
    wrong = client.post(f"{address}&format=pdf", rows.to_csv(index=False))
    assert wrong.status_code == 422 and "xlsx or csv" in wrong.json()["error"]
    lacking = client.post(f"{address}&format=csv", rows.drop(columns="rain").to_csv(index=False))
    assert lacking.status_code == 422 and "column 'rain' is missing" in lacking.json()["error"]
    assert client.get(f"/{TOKEN}/runs/{advised}/predictions/..%2Frun.toml").status_code == 404


def test_a_client_is_added_after_the_report(client, advised, folder):
    rows = table()
    rows = rows[rows["shop"] == "Shop-5"]
    reply = client.post(f"/{TOKEN}/runs/{advised}/join?name=joining.csv", rows.to_csv(index=False)).json()
    joined = reply["next"].rpartition("/")[2]
    wait_for(client, joined)
    text = client.get(f"/{TOKEN}/runs/{joined}").text
    assert "1 new client" in text and '<th scope="row">Shop-5</th>' in text and "Predict new rows" in text
    reply = client.post(f"/{TOKEN}/runs/{joined}/predict?name=more.csv&format=csv", rows.to_csv(index=False)).json()
    frame = pd.read_csv(io.BytesIO(client.get(f"/{TOKEN}/runs/{reply['file']}").content))
    assert not frame["model"].str.contains("unknown").any()


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("winsorize=0.9", "winsorize must be a share between 0 and 0.5"),
        ("winsorize=much", "winsorize must be a share"),
        ("header_row=0", "header row must be a whole number from 1 on"),
        ("merge_levels=x", "--merge-levels takes OLD=NEW"),
        ("client=nowhere&target=sold", "nowhere"),
    ],
)
def test_wrong_addresses_of_a_table_get_a_sentence(client, folder, query, sentence):
    page = f"/{TOKEN}/{upload(client, table(), 'wrong.csv')}?{query}"
    assert sentence in html.unescape(client.get(page).text)
