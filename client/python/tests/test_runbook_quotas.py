"""The runbook of deploy/README.md, from nothing: quotas of users and groups."""

from __future__ import annotations

import grp
import re

from daemon import program
from runbook import attach, executes, read_yaml, train

# Users who have neither a job nor, on most machines, a name.
_USER = 61711


@executes("optctl get quotas", "optctl get users", "optctl quota USER")
def test_quotas(operator, start_daemon, tmp_path):
    text = read_yaml("quotas:\n")
    group = grp.getgrall()[0].gr_name
    for old, new in {"user: ada": f"user: {_USER}", "group: research": f"group: {group}"}.items():
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "optstated.yaml"
    config.write_text(text.replace(str(_USER), "ada-whom-nobody-knows"))
    check = [program("optstated"), "--config", str(config), "--check-config"]
    refused = operator.execute(check)
    assert refused.returncode != 0 and "optstated.yaml:2: quotas[0]" in refused.stderr
    config.write_text(text)
    daemon = start_daemon("--config", str(config))
    model, optimizer = attach(daemon.shm)
    train(model, optimizer)
    quotas = operator.run("optctl get quotas")
    assert re.search(rf"^user +{_USER} +0/8 .* 0 B/400.0 GiB .* 200$", quotas, re.MULTILINE)
    assert re.search(rf"^group +{group} .*/64 .*/1.0 TiB .*/64.0 GiB +.*/8.0 TiB", quotas, re.M)
    # This user is the daemon's: it has no limits.
    assert re.search(r"^user .* 1/- +1/- ", quotas, re.MULTILINE)
    users = operator.run("optctl get users")
    assert re.search(rf"^{_USER} +{_USER} +0 ", users, re.MULTILINE)
    quota = operator.run("optctl quota USER", replaced={"USER": str(_USER)})
    assert re.search(rf"^user {_USER} +jobs +0 +8 +0% +quotas\[0\].jobs_max$", quota, re.MULTILINE)
    assert "`systemctl reload optstated`" in quota
    optimizer.close()


@executes("id USER")
def test_the_system_says_who_is_in_a_group(operator):
    assert "uid=0(root)" in operator.run("id USER", replaced={"USER": "root"})
