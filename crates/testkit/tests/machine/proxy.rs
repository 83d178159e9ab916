//! HTTP by the proxy to servers in real guests.

use crate::http::{PROXY, WITH_PROXY, get};
use crate::support::{Jiffy, jiffy_with};
use std::thread;
use std::time::Duration;

/// How long a request may take that wakes a VM.
const LIMIT: Duration = Duration::from_secs(120);

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
    fn by_proxy(&self, request: String) -> String {
        let ask = self.ask(PROXY, request, LIMIT);
        ask.output().expect("an answer").text()
    }
}

#[test]
fn guests_answer_by_the_proxy_and_sleep_between_requests() {
    let jiffy = jiffy_with(WITH_PROXY);
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
    let file = |vm: &str, path: &str| jiffy.by_proxy(get(vm, 8080, path));
    for name in ["web", &id] {
        let answer = file(name, "/page");
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.ends_with("page"),
            "{answer}"
        );
    }
    let numbers = file("web", "/numbers");
    assert!(
        numbers.ends_with("199999\n200000"),
        "{} bytes",
        numbers.len()
    );
    let upgrade = "GET / HTTP/1.1\r\nHost: 8081-web.localhost\r\n\
                   Connection: Upgrade\r\nUpgrade: line\r\n\r\nhello\n";
    let switched = jiffy.by_proxy(upgrade.to_owned());
    assert!(
        switched.contains(" 101 ") && switched.ends_with("heard hello"),
        "{switched}"
    );
    let asleep = || jiffy.inspect("web")["state"] == "hibernated";
    jiffy.eventually("it sleeps", asleep);
    assert!(jiffy.inspect("web")["pid"].is_null(), "it has no VMM");
    // Ten at once wake it once, and each is answered.
    let answers: Vec<String> = thread::scope(|scope| {
        let asking: Vec<_> = (0..10)
            .map(|_| scope.spawn(|| file("web", "/page")))
            .collect();
        let answered = asking.into_iter().map(|one| one.join());
        answered.map(|answer| answer.expect("an answer")).collect()
    });
    let is_page = |answer: &String| answer.starts_with("HTTP/1.1 200");
    assert!(answers.iter().all(is_page), "{answers:?}");
    let wakes = jiffy.sh("grep -c 'VM woken vm=web' /run/jiffy/jiffyd.log || true");
    assert_eq!(wakes, "1");
    jiffy.eventually("it sleeps again", asleep);
    jiffy.ok(&["rm", "-f", "web"]);
    assert!(file("web", "/page").starts_with("HTTP/1.1 404"));
    jiffy.assert_nothing_left(&before, "a VM behind the proxy");
}
