//! More VMs at once than the machine has memory for.

use crate::support::jiffy;
use std::time::Duration;

/// Concurrent runs. Their memory is 100 GiB in all, and the machine has 4.
const RUNS: usize = 200;
/// Least number of them that must fit at once.
const AT_ONCE: usize = 5;

#[test]
fn two_hundred_runs_at_once_end_with_an_answer_or_one_error() {
    let jiffy = jiffy();
    // With a golden snapshot of this kind each run uses less memory.
    jiffy.ok(&["run", "--rm", "--memory", "512M", "--", "true"]);
    jiffy.eventually("a golden snapshot of it", || {
        let all = jiffy.json(&["snapshot", "ls", "--all", "--format", "json"]);
        let mut all = all.as_array().into_iter().flatten();
        all.any(|one| one["golden"] == true && one["memory_mib"] == 512)
    });
    let before = jiffy.settled_traces();
    let script = format!(
        "export JIFFY_MACHINE=never; mkdir /run/many && cd /run/many || exit 1; \
         one() {{ /bin/jiffy run --rm --memory 512M --name many-$1 -- echo $1 > out.$1 2> err.$1; echo $? > code.$1; }}; \
         n=0; while [ $n -lt {RUNS} ]; do n=$((n+1)); one $n & done; wait; \
         n=0; while [ $n -lt {RUNS} ]; do n=$((n+1)); \
         /bin/jiffy timeline many-$n 2>/dev/null | grep -q 'room waited for' && echo waited; \
         echo \"$(cat code.$n)|$(cat out.$n)|$(tr '\\n' '|' < err.$n)\"; done; \
         cd /; rm -r /run/many"
    );
    let answer = jiffy
        .lab
        .command(["/bin/sh", "-c", &script])
        .time_limit(Duration::from_secs(3600))
        .output()
        .expect("it runs");
    let text = answer.text();
    let (waited, lines): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| *line == "waited");
    assert_eq!(lines.len(), RUNS, "{text} {}", answer.error_text());
    let mut answered = 0;
    for (number, line) in (1..).zip(lines) {
        match line.split('|').collect::<Vec<_>>()[..] {
            ["0", out, ""] if out == number.to_string() => answered += 1,
            ["125", "", sentence, hint, ""] => {
                let begin = "jiffy: The VM wants 512 MiB of memory and waited";
                assert!(sentence.starts_with(begin), "{line}");
                assert!(hint.starts_with("  hint: "), "{line}");
            }
            _ => panic!("{line}"),
        }
    }
    let waited = waited.len();
    println!("{answered} of {RUNS} runs were answered, {waited} of them after a wait");
    assert!(answered >= AT_ONCE, "{answered}");
    assert!(
        waited + RUNS - answered > 0,
        "there was room for all of them at once"
    );
    jiffy.assert_nothing_left(&before, "after them");
    // The reserved memory is available again.
    jiffy.ok(&["run", "--rm", "--memory", "512M", "--", "true"]);
}
