//! Prints the slowest tests at the end of a run.

use jiffy_sys::mutex::lock;
use std::sync::Mutex;
use std::time::Duration;

/// How many tests are printed.
const MOST_PRINTED: usize = 10;

struct TestTime {
    test: String,
    time: Duration,
    used: Option<Duration>,
}

static TOOK: Mutex<Vec<TestTime>> = Mutex::new(Vec::new());

/// Records the duration of this thread's test, and how much CPU time its machine used: a test that
/// is slow but uses little CPU time waits. The slowest tests are printed when the process exits.
#[allow(unsafe_code)]
pub fn note(time: Duration, used: Option<Duration>) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let mut took = lock(&TOOK);
    if took.is_empty() {
        // SAFETY: `print` is a plain function, which exists for the whole program.
        unsafe {
            libc::atexit(print);
        }
    }
    took.push(TestTime { test, time, used });
}

extern "C" fn print() {
    let took = lock(&TOOK);
    // Not for one or two tests that were selected by name.
    if took.len() > 2 {
        print!("{}", table(&took));
    }
}

fn table(took: &[TestTime]) -> String {
    let mut slowest: Vec<&TestTime> = took.iter().collect();
    slowest.sort_by_key(|took| std::cmp::Reverse(took.time));
    let mut text = String::from("the slowest tests; seconds, and CPU seconds of the machine:\n");
    for took in slowest.into_iter().take(MOST_PRINTED) {
        let used = took.used.map_or_else(
            || "    -".to_owned(),
            |used| format!("{:5.1}", used.as_secs_f64()),
        );
        let seconds = took.time.as_secs_f64();
        text += &format!("{seconds:6.1} {used}  {}\n", took.test);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first_and_only_ten() {
        let took: Vec<_> = (0..12)
            .map(|n| TestTime {
                test: format!("test {n}"),
                time: Duration::from_millis(n * 1500),
                used: (n == 10).then_some(Duration::from_millis(700)),
            })
            .collect();
        let text = table(&took);
        let lines: Vec<_> = text.lines().skip(1).collect();
        assert_eq!(lines.len(), MOST_PRINTED);
        assert_eq!(lines[0], "  16.5     -  test 11");
        assert_eq!(lines[1], "  15.0   0.7  test 10");
        assert_eq!(lines[9], "   3.0     -  test 2");
    }
}
