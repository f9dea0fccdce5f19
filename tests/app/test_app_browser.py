"""The local page in a real browser: from a dropped file to the report and the models."""

import os
import re
import subprocess
import sys

import pandas as pd
import pytest

from tests.app.tables import table
from tests.support.browser import launched, needs_browser

driver = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
pytest.importorskip("uvicorn", reason="the page's server is not installed")
pytestmark = needs_browser


@pytest.fixture
def address(tmp_path):
    """The address that `mooring app` prints, served by a process of its own."""
    words = [sys.executable, "-m", "mooring", "app", "--folder", str(tmp_path / "kept")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as app:
        reply = app.stdout.readline()
        yield re.search(r"http://\S+", reply).group()
        app.terminate()


def test_from_a_dropped_file_to_the_report(address, tmp_path):
    complaints, asked = [], []
    rows = tmp_path / "rows.csv"
    table().head(20).to_csv(rows, index=False)
    with driver.sync_playwright() as play:
        browser = launched(play)
        page = browser.new_context(accept_downloads=True).new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        dropped = page.evaluate_handle(
            """text => { const transfer = new DataTransfer();
            transfer.items.add(new File([text], "my shops.csv", { type: "text/csv" })); return transfer; }""",
            table().to_csv(index=False),
        )
        page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})
        page.wait_for_url("**/tables/my-shops.csv")
        assert page.get_by_label("Client:").input_value() == "shop"
        assert page.get_by_label("Target:").input_value() == "sold"
        assert page.get_by_role("button", name="Recommend").is_enabled()
        assert page.locator("li.error").count() == 0
        page.get_by_label("Leave out clients").check()
        page.wait_for_url("**drop_small=on**")
        assert "Shop-tiny" in page.locator("li.warning").first.inner_text()
        page.get_by_role("button", name="Recommend").click()
        page.wait_for_url("**/runs/my-shops-advice")
        page.locator("#headline").wait_for()
        assert "6 clients" in page.locator("#headline").inner_text()
        with page.expect_download() as coming:
            page.get_by_role("link", name="coefficients").click()
        coming.value.save_as(tmp_path / "coefficients.csv")
        assert len(pd.read_csv(tmp_path / "coefficients.csv")["client"].unique()) == 6
        page.get_by_role("link", name="Open the report").click()
        assert "6 clients" in page.locator("h1").inner_text()
        page.locator("table.clients tbody tr").first.wait_for()  # a script writes the rows
        assert page.locator("table.clients tbody tr").count() == 6
        page.go_back()
        page.set_input_files("#rows", str(rows))
        with page.expect_download() as coming:
            page.locator("#predict-rows").click()
        coming.value.save_as(tmp_path / "predictions.xlsx")
        assert len(pd.read_excel(tmp_path / "predictions.xlsx")) == 20
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            for place in (page.url, address):
                page.goto(place)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert complaints == []
    home = address.split("/")[2]
    assert {url.split("/")[2] for url in asked if not url.startswith(("data:", "blob:"))} == {home}
