//! Hostile peers and files.

use super::support::*;
use jiffy_wire::pager::{PagerRequest, PagerResponse};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// The question of a VMM that can map a working set.
const QUESTION: &str = "{\"working_set\":true}\n";

#[test]
fn invalid_handshakes_are_refused_with_a_message_and_leak_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let socket = pager.serve("vm", &image);
    let before = pager.count("fd");
    let memory = Memory::new(MIB);
    let refused = |text: &str, fds: &[std::os::fd::BorrowedFd<'_>]| {
        let stream = UnixStream::connect(&socket).unwrap();
        greet(&stream, text, fds);
        failure_message(&stream)
    };
    let good = memory.mapping();
    let uffd = memory.uffd();
    assert!(refused("nonsense", &[uffd]).contains("JSON"));
    assert!(refused("{}", &[uffd]).contains("JSON"));
    assert!(refused("[]", &[uffd]).contains("0 mappings"));
    assert!(refused(&format!("[{good}]"), &[]).contains("0 descriptors"));
    assert!(refused(&format!("[{good}]"), &[uffd, uffd]).contains("more than one"));
    let null = File::open("/dev/null").unwrap();
    assert!(refused(&format!("[{good}]"), &[null.as_fd()]).contains("not a userfaultfd"));
    assert!(refused(&format!("[{good},{good}]"), &[uffd]).contains("overlap"));
    let long = good.replace(&format!("\"size\":{MIB}"), &format!("\"size\":{}", 2 * MIB));
    assert!(refused(&format!("[{long}]"), &[uffd]).contains("beyond the end"));
    let negative = good.replace("\"offset\":0", "\"offset\":-1");
    assert!(refused(&format!("[{negative}]"), &[uffd]).contains("JSON"));
    let odd = good.replace("\"offset\":0", "\"offset\":1");
    assert!(refused(&format!("[{odd}]"), &[uffd]).contains("whole pages"));
    let spaces = " ".repeat(70 << 10);
    let stream = UnixStream::connect(&socket).unwrap();
    let _ = (&stream).write_all(spaces.as_bytes());
    assert!(failure_message(&stream).contains("longer than"));
    // A silent client is disconnected after a while.
    let silent = UnixStream::connect(&socket).unwrap();
    assert!(failure_message(&silent).contains("too long"));

    eventually("descriptors stay open", || pager.count("fd") <= before);
    let _connection = memory.connect(&socket);
    assert_page(memory.read_page(8).bytes(), page(8));
}

/// Stops the pager for longer than a handshake may take, while `work` runs.
fn while_pager_is_stopped(pager: &Pager, work: impl FnOnce()) {
    pager.signal(rustix::process::Signal::STOP);
    work();
    thread::sleep(Duration::from_millis(10_100));
    pager.signal(rustix::process::Signal::CONT);
}

#[test]
fn an_image_that_is_a_fifo_is_refused_without_blocking() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    let pager = Pager::start(folder.path(), &[]);
    let answer = pager.ask(&PagerRequest::Serve {
        name: "pipe".into(),
        socket: folder.path().join("pipe.sock"),
        image: pipe.clone(),
        record: None,
        prefetch: false,
    });
    assert!(matches!(answer, PagerResponse::Error(_)), "{answer:?}");
    let image = image(folder.path(), MIB, |_| {});
    pager.serve("vm", &image);
}

#[test]
fn a_handshake_sent_while_the_pager_is_busy_is_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let stream = UnixStream::connect(pager.serve("vm", &image)).unwrap();
    let mut words = BufReader::new(&stream);
    greet(&stream, QUESTION, &[]);
    words.read_line(&mut String::new()).unwrap();
    let memory = Memory::new(MIB);
    while_pager_is_stopped(&pager, || {
        let mappings = format!("[{}]", memory.mapping());
        greet(&stream, &mappings, &[memory.uffd()]);
    });
    assert_page(memory.read_page(8).bytes(), page(8));
}

#[test]
fn a_late_answer_extends_the_handshake_deadline_but_not_forever() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let stream = UnixStream::connect(pager.serve("vm", &image)).unwrap();
    let mut words = BufReader::new(&stream);
    while_pager_is_stopped(&pager, || greet(&stream, QUESTION, &[]));
    words.read_line(&mut String::new()).unwrap();
    thread::sleep(Duration::from_millis(200));
    let memory = Memory::new(MIB);
    let mappings = format!("[{}]", memory.mapping());
    greet(&stream, &mappings, &[memory.uffd()]);
    assert_page(memory.read_page(8).bytes(), page(8));

    let asking = UnixStream::connect(pager.serve("other", &image)).unwrap();
    let mut words = BufReader::new(&asking);
    let mut answer = String::new();
    eventually("it may ask forever", || {
        thread::sleep(Duration::from_millis(100));
        answer.clear();
        // After the refusal, this write fails.
        let _ = (&asking).write_all(QUESTION.as_bytes());
        words.read_line(&mut answer).unwrap();
        !answer.contains("working_set")
    });
    assert!(answer.contains("too long"), "{answer}");
}

#[test]
fn invalid_requests_are_answered_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let mut control = Control::connect(&pager.control);
    let refused = |answer: PagerResponse| match answer {
        PagerResponse::Error(sentence) => sentence,
        other => panic!("{other:?}"),
    };
    assert!(refused(control.send_line("{]\n")).contains("not a request"));
    assert!(refused(control.send_line("\n")).contains("not a request"));
    for name in ["nobody", "", "../x"] {
        let name = name.to_owned();
        for request in [
            PagerRequest::Complete { name: name.clone() },
            PagerRequest::Forget { name: name.clone() },
            PagerRequest::Stats { name },
        ] {
            assert!(refused(control.ask(&request)).contains("is served here"));
        }
    }
    let serve = |name: &str, socket: &str, image: &Path| PagerRequest::Serve {
        name: name.into(),
        socket: folder.path().join(socket),
        image: image.into(),
        record: None,
        prefetch: false,
    };
    let missing = folder.path().join("missing");
    assert!(refused(control.ask(&serve("a", "a", &missing))).contains("missing"));
    let text = folder.path().join("text");
    fs::write(&text, b"no image").unwrap();
    assert!(refused(control.ask(&serve("a", "a", &text))).contains("text"));
    assert!(refused(control.ask(&serve("a", "text", &image))).contains("not a socket"));
    assert_eq!(fs::read(&text).unwrap(), b"no image");
    assert!(refused(control.ask(&serve("a", "x/y", &image))).contains("cannot be listened on"));

    assert_eq!(control.ask(&serve("a", "a", &image)), PagerResponse::Ok);
    assert_eq!(
        control.ask(&serve("a", "a", &image)),
        PagerResponse::Ok,
        "asked again"
    );
    assert!(refused(control.ask(&serve("a", "b", &image))).contains("already"));
    assert!(refused(control.ask(&serve("b", "a", &image))).contains("another VM"));
    assert!(refused(pager.complete("a")).contains("not connected"));

    // Several requests at once are answered in order; an endless line is refused.
    let ping = serde_json::to_string(&PagerRequest::Ping).unwrap();
    assert_eq!(
        control.send_line(&format!("{ping}\nx\n")),
        PagerResponse::Ok
    );
    assert!(refused(control.send_line("")).contains("not a request"));
    let endless = "x".repeat(80 << 10);
    assert!(refused(control.send_line(&endless)).contains("longer than"));
    assert!(control.is_closed());
    assert_eq!(pager.ask(&PagerRequest::Ping), PagerResponse::Ok);
}

#[test]
fn a_damaged_chunk_ends_its_vm_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 2 * MIB, |_| {});
    let reader = jiffy_store::ImageReader::open(&path).unwrap();
    let damaged = 20;
    let place = reader.stored_range(damaged).unwrap().unwrap();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, place.end - 1).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], place.end - 1).unwrap();

    let pager = Pager::start(folder.path(), &[]);
    let one = Memory::new(2 * MIB);
    let connection = one.connect(&pager.serve("one", &path));
    let other = Memory::new(2 * MIB);
    let _connection = other.connect(&pager.serve("other", &path));
    assert_page(one.read_page(3).bytes(), page(3));
    let stuck = one.read_page(damaged as usize * 2);
    let sentence = failure_message(&connection);
    assert!(
        sentence.contains(&format!("chunk {damaged} at byte {}", place.start)),
        "{sentence}"
    );
    assert!(sentence.contains("ram.img"), "{sentence}");
    assert_eq!(pager.stats("one").failed, Some(sentence.clone()));
    assert_eq!(pager.complete("one"), PagerResponse::Error(sentence));
    assert!(stuck.is_stuck(), "nothing wrong was filled in");
    assert_page(other.read_page(3).bytes(), page(3));
    assert_eq!(pager.stats("other").failed, None);
    // All chunks but the damaged one are filled, and the completion names that one.
    let PagerResponse::Error(sentence) = pager.complete("other") else {
        panic!("it cannot be whole");
    };
    assert!(sentence.contains(&format!("chunk {damaged}")));
    for number in (0..2 * MIB / PAGE).filter(|number| number / 2 != damaged as usize) {
        assert_eq!(other.arena.read(number * PAGE), page(number)[0]);
    }
}

#[test]
fn a_fault_outside_the_mappings_fails_the_vm_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(2 * MIB);
    let stream = UnixStream::connect(pager.serve("vm", &image)).unwrap();
    let half = memory
        .mapping()
        .replace(&format!("\"size\":{}", 2 * MIB), &format!("\"size\":{MIB}"));
    greet(&stream, &format!("[{half}]"), &[memory.uffd()]);
    assert_page(memory.read_page(1).bytes(), page(1));
    let _stuck = memory.read_page(MIB / PAGE + 1);
    assert!(failure_message(&stream).contains("in no mapping"));
}

/// The flag belongs to the open file description, which VMM and pager share.
#[test]
fn a_vmm_with_a_blocking_userfaultfd_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    let (one, other) = (Memory::new(MIB), Memory::new(MIB));
    if !one.supports_nowait() {
        return eprintln!("skipped: this kernel knows no RWF_NOWAIT of a userfaultfd");
    }
    let connection = one.connect(&pager.serve("one", &image));
    let _connection = other.connect(&pager.serve("other", &image));
    assert_page(one.read_page(3).bytes(), page(3));
    rustix::fs::fcntl_setfl(one.uffd(), rustix::fs::OFlags::empty()).unwrap();
    let _stuck = one.read_page(100);
    join(other.check(1));
    assert!(failure_message(&connection).contains("blocking"));
}

#[test]
fn a_second_pager_does_not_take_the_control_socket_of_a_first() {
    let folder = tempfile::tempdir().unwrap();
    let pager = Pager::start(folder.path(), &[]);
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_jiffy-pager"))
        .args(["serve", "--control"])
        .arg(&pager.control)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("another pager answers there"), "{text}");
    assert_eq!(pager.ask(&PagerRequest::Ping), PagerResponse::Ok);
}
