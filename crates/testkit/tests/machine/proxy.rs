//! HTTP by the proxy to servers in real guests.

use crate::support::{Jiffy, jiffy_with};

const PROXY: &str = "127.0.0.1:9000";

/// The servers of a guest: files at port 8080, and at port 8081 a protocol that repeats one line.
const SERVERS: &str = r#"mkdir /www; echo page > /www/page; seq 200000 > /www/numbers
printf '%s\n' '#!/bin/sh' 'while read -r line && [ "${line%?}" ]; do :; done' \
    'printf "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: line\r\n\r\n"' \
    'read -r line; echo "heard $line"' > /www/repeat
chmod +x /www/repeat
httpd -h /www -p 8080
exec nc -ll -p 8081 -e /www/repeat"#;

impl Jiffy {
    /// What comes back for a request over a connection of its own.
    fn by_proxy(&self, request: &str) -> String {
        let ask = self.lab.command(["/tests/witness", "ask", PROXY, "120"]);
        ask.stdin(request).output().expect("an answer").text()
    }

    fn get(&self, path: &str, host: &str) -> String {
        self.by_proxy(&format!(
            "GET {path} HTTP/1.1\r\nHost: {host}.localhost\r\nConnection: close\r\n\r\n"
        ))
    }

    fn count_of(&self, line: &str) -> usize {
        let log = format!("grep -c '{line}' /run/jiffy/jiffyd.log || true");
        self.sh(&log).parse().expect("a count")
    }
}

#[test]
fn guests_answer_by_the_proxy_and_sleep_between_requests() {
    let jiffy = jiffy_with(&[("JIFFY_VM_NETWORK", "on"), ("JIFFY_PROXY", PROXY)]);
    let before = jiffy.settled_traces();
    jiffy.push_witness();
    let run = ["run", "-d", "--name", "web", "--idle", "1s"];
    jiffy.ok(&[&run[..], &["--", "sh", "-c", SERVERS]].concat());
    let listens = "until netstat -ltn | grep -q :8081; do sleep 0.1; done";
    jiffy.ok(&["exec", "web", "sh", "-c", listens]);
    let id = jiffy.inspect("web")["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    for host in ["8080-web", &format!("8080-{id}")] {
        let answer = jiffy.get("/page", host);
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.ends_with("page"),
            "{answer}"
        );
    }
    let numbers = jiffy.get("/numbers", "8080-web");
    assert!(
        numbers.ends_with("199999\n200000"),
        "{} bytes",
        numbers.len()
    );
    let upgrade = "GET / HTTP/1.1\r\nHost: 8081-web.localhost\r\n\
                   Connection: Upgrade\r\nUpgrade: line\r\n\r\nhello\n";
    let switched = jiffy.by_proxy(upgrade);
    assert!(
        switched.contains(" 101 ") && switched.ends_with("heard hello"),
        "{switched}"
    );
    let asleep = || jiffy.inspect("web")["state"] == "hibernated";
    jiffy.eventually("it sleeps", asleep);
    assert!(jiffy.inspect("web")["pid"].is_null(), "it has no VMM");
    // Ten at once wake it once, and each is answered.
    let ask = format!(
        "request() {{ printf 'GET /page HTTP/1.1\\r\\nHost: 8080-web.localhost\\r\\nConnection: close\\r\\n\\r\\n'; }}\n\
         for n in $(seq 10); do request | /tests/witness ask {PROXY} 120 & done; wait"
    );
    let answers = jiffy.sh(&ask);
    assert_eq!(answers.matches("HTTP/1.1 200").count(), 10, "{answers}");
    assert_eq!(jiffy.count_of("VM woken vm=web"), 1);
    jiffy.eventually("it sleeps again", asleep);
    jiffy.ok(&["rm", "-f", "web"]);
    assert!(jiffy.get("/page", "8080-web").starts_with("HTTP/1.1 404"));
    jiffy.assert_nothing_left(&before, "a VM behind the proxy");
}
