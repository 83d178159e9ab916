//! Every target is called with its seeds, and with each input in `fuzz/corpus` and
//! `fuzz/regressions`: without libFuzzer, as an ordinary test.

use jiffy_fuzz::{TARGETS, Target, scratch};
use std::fs;
use std::io::Write;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The target and input that run now: a panic may be on a device's own thread.
static NOW: Mutex<String> = Mutex::new(String::new());

#[test]
fn targets_survive_all_kept_inputs() {
    let folder = tempfile::tempdir().expect("a folder");
    scratch::set_folder(folder.path());
    let path = folder.path().to_owned();
    panic::set_hook(Box::new(move |info| {
        let now = NOW.lock().map_or(String::new(), |now| now.clone());
        // Past the test's captured output, which ends with this process.
        let _ = writeln!(std::io::stderr(), "{now}: {info}");
        let _ = fs::remove_dir_all(&path);
        // As under libFuzzer: a panic on any thread is a failure.
        std::process::exit(101);
    }));
    for target in TARGETS {
        for (number, seed) in (target.seeds)().iter().enumerate() {
            call(target, &format!("seed {number}"), seed);
        }
        for path in inputs(target.name) {
            let input = fs::read(&path).expect("an input is read");
            call(target, &path.display().to_string(), &input);
        }
    }
    let _ = panic::take_hook();
}

fn call(target: &Target, name: &str, input: &[u8]) {
    *NOW.lock().expect("a name") = format!("{}, {name}", target.name);
    (target.run)(input);
}

/// The kept inputs of a target, sorted.
fn inputs(target: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for kind in ["corpus", "regressions"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(kind)
            .join(target);
        let entries = fs::read_dir(folder).into_iter().flatten();
        paths.extend(entries.map(|entry| entry.expect("an entry").path()));
    }
    paths.sort();
    paths
}
