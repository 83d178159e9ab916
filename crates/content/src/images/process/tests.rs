//! With scripts in place of the program: what one that was taken over might do.

use super::*;
use jiffy_wire::import::{Answer, Failure};
use std::cell::{Cell, RefCell};
use std::fs;

struct Watched {
    cancelled: Cell<bool>,
    moved: RefCell<Vec<(u64, u64)>>,
}

impl Watch for Watched {
    fn moved(&self, done: u64, total: u64) {
        self.moved.borrow_mut().push((done, total));
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.get()
    }
}

struct Trial {
    folder: tempfile::TempDir,
    watched: Watched,
}

impl Trial {
    fn new() -> Trial {
        Trial {
            folder: tempfile::tempdir().unwrap(),
            watched: Watched {
                cancelled: Cell::new(false),
                moved: RefCell::default(),
            },
        }
    }

    /// Imports `stream` with this script, which has a shell's variables for its answers.
    fn import(&self, script: &str, stream: &mut dyn Read) -> Result<Imported, ImportError> {
        let program = self.folder.path().join("program");
        let made = Answer::Made(Made::default());
        let texts = [
            ("MADE", encode(&made).unwrap()),
            (
                "HALFWAY",
                encode(&Answer::Progress { done: 9, total: 4 }).unwrap(),
            ),
            ("FULL", failure(FailureKind::Full, "x")),
            (
                "REFUSED",
                failure(FailureKind::Source, "it is\n\x1b[31mred"),
            ),
        ];
        let mut text = "#!/bin/sh\n".to_owned();
        for (name, bytes) in texts {
            let octal: String = bytes.iter().map(|byte| format!("\\{byte:03o}")).collect();
            text.push_str(&format!("{name}='{octal}'\n"));
        }
        text.push_str(script);
        jiffy_sys::testing::write_program(&program, &text);
        let out = self.folder.path().join("out");
        fs::create_dir(&out).unwrap();
        let input = Input {
            source: Source::Archive {
                reference: None,
                format: None,
            },
            files: Vec::new(),
            stream: Some(stream),
        };
        let imported = Importer::new(program).import(input, &out, &self.watched);
        let names: Vec<_> = fs::read_dir(&out)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, [ROOT], "no temporary file has a name");
        imported
    }
}

fn failure(kind: FailureKind, sentence: &str) -> Vec<u8> {
    let sentence = sentence.to_owned();
    encode(&Answer::Failed(Failure { kind, sentence })).unwrap()
}

fn refusal(script: &str) -> ImportError {
    Trial::new()
        .import(script, &mut &b"archive"[..])
        .expect_err(script)
}

fn said(script: &str) -> String {
    match refusal(script) {
        ImportError::Process(sentence) => sentence,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_node_itself_determines_size_and_digest() {
    let trial = Trial::new();
    let script = "cat <&8 >&4; printf \"$HALFWAY$MADE\" >&3";
    let imported = trial.import(script, &mut &b"archive"[..]).unwrap();
    assert_eq!(imported.size, 7);
    let digest = blake3::hash(b"archive").to_hex().to_string();
    assert_eq!(imported.digest, digest);
    assert_eq!(*trial.watched.moved.borrow(), [(4, 4)], "it is bounded");
}

#[test]
fn the_process_has_no_environment_and_no_other_descriptor() {
    let trial = Trial::new();
    // The shell sets PWD and the like itself, but gets nothing.
    let script = "tr '\\0' '\\n' </proc/$$/environ >&4; ls /proc/$$/fd >&4; printf \"$MADE\" >&3";
    trial.import(script, &mut &b""[..]).unwrap();
    let image = fs::read_to_string(trial.folder.path().join("out").join(ROOT)).unwrap();
    let mut numbers: Vec<u32> = image
        .lines()
        .map(|line| line.parse().expect(line))
        .collect();
    numbers.sort_unstable();
    // The shell reads its script from a descriptor of its own, with a number of two digits.
    numbers.retain(|number| *number < 10);
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn answers_that_are_too_long_too_many_or_no_answers_are_refused() {
    let sentence = said("printf '\\377\\377\\377\\377' >&3; exec sleep 60");
    assert!(sentence.contains("4294967295 bytes"), "{sentence}");
    for short in ["\\1\\0\\0\\0\\1", "\\4\\0\\0\\0\\1\\0\\0\\0"] {
        let sentence = said(&format!("printf '{short}' >&3; exec sleep 60"));
        assert!(sentence.contains("is not valid"), "{sentence}");
    }
    let sentence = said("printf '\\4\\0\\0\\0\\7\\0\\0\\0' >&3; exec sleep 60");
    assert!(sentence.contains("version 7, expected 1"), "{sentence}");
    let sentence = said("while :; do printf \"$HALFWAY\"; done >&3");
    assert!(sentence.contains("too many messages"), "{sentence}");
    let sentence = said("printf \"$MADE\" >&3");
    assert!(sentence.contains("wrote no image"), "{sentence}");
}

#[test]
fn a_process_that_ends_is_an_error_that_says_how() {
    assert!(said("exit 3").contains("ended with status 3 before"));
    assert!(said("kill -SEGV $$").contains("ended by signal 11 before"));
    assert!(said("kill -KILL $$").contains("signal 9, perhaps for lack of memory, before"));
    assert!(said("exec 3>&-; exec sleep 60").contains("closed its channel"));
    // Half an answer.
    assert!(said("printf '\\100\\0\\0\\0\\1' >&3; exit 4").contains("status 4"));
}

#[test]
fn refusals_have_their_kind_and_no_control_characters() {
    assert!(matches!(refusal("printf \"$FULL\" >&3"), ImportError::Full));
    let ImportError::Source(sentence) = refusal("printf \"$REFUSED\" >&3") else {
        panic!("another kind");
    };
    assert_eq!(sentence, "it is\u{fffd}\u{fffd}[31mred");
    let missing = Importer::new("/nonexistent/jiffy-import".into());
    let folder = tempfile::tempdir().unwrap();
    let input = Input {
        source: Source::Archive {
            reference: None,
            format: None,
        },
        files: Vec::new(),
        stream: None,
    };
    let error = missing.import(input, folder.path(), &Trial::new().watched);
    assert!(matches!(error, Err(ImportError::Start(..))));
}

#[test]
fn a_refusal_in_the_middle_of_the_stream_is_reported() {
    // Endless, unless it is ended.
    let trial = Trial::new();
    let script = "head -c 100 <&8 >/dev/null; printf \"$REFUSED\" >&3; exec 8<&-";
    let error = trial.import(script, &mut io::repeat(7)).unwrap_err();
    assert!(matches!(error, ImportError::Source(_)), "{error:?}");
}

#[test]
fn a_stream_that_breaks_is_the_reason() {
    struct Breaks;
    impl Read for Breaks {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::ConnectionAborted.into())
        }
    }
    let error = Trial::new()
        .import("exec sleep 60", &mut Breaks)
        .unwrap_err();
    let ImportError::Stream(error) = error else {
        panic!("{error:?}");
    };
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
}

#[test]
fn a_cancelled_import_ends_its_process() {
    for stream in [&mut io::repeat(7) as &mut dyn Read, &mut &b""[..]] {
        let trial = Trial::new();
        trial.watched.cancelled.set(true);
        let begun = Instant::now();
        let script = "echo $$ >\"$0.pid\"; exec sleep 600";
        let error = trial.import(script, stream).unwrap_err();
        assert!(matches!(error, ImportError::Cancelled), "{error:?}");
        assert!(begun.elapsed() < Duration::from_secs(60));
        // It was killed and reaped, unless it had not even begun, or not written its number.
        let pid = fs::read_to_string(trial.folder.path().join("program.pid"));
        if let Some(pid) = pid.ok().filter(|pid| pid.ends_with('\n')) {
            assert!(!Path::new(&format!("/proc/{}", pid.trim())).exists());
        }
    }
}
