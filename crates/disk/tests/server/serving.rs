use super::client::*;
use jiffy_devices::virtio::testing::Buffer;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;
const DATA: u64 = 0x10000;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;

const FEATURE_RO: u64 = 1 << 5;
const FEATURE_FLUSH: u64 = 1 << 9;
const FEATURE_DISCARD: u64 = 1 << 13;

/// One request in the usual shape; its status.
fn request(guest: &mut Guest, kind: u32, sector: u64, data: Option<Buffer>) -> u8 {
    let mut header = numbers32(&[kind, 0]);
    header.extend(sector.to_le_bytes());
    guest.driver.store(HEADER, &header);
    guest.driver.store(STATUS, &[0xee]);
    let mut buffers = vec![Buffer::readable(HEADER, 16)];
    buffers.extend(data);
    buffers.push(Buffer::writable(STATUS, 1));
    guest.driver.add(&buffers);
    guest.ring();
    guest.driver.wait_used();
    let mut status = [0];
    guest.driver.load(STATUS, &mut status);
    status[0]
}

fn read(guest: &mut Guest, sector: u64) -> Vec<u8> {
    let status = request(guest, IN, sector, Some(Buffer::writable(DATA, 512)));
    assert_eq!(status, 0);
    let mut data = vec![0; 512];
    guest.driver.load(DATA, &mut data);
    data
}

#[test]
fn a_monitor_reads_the_disks_features_and_size() {
    let server = Server::start(64, &["--queues", "3"]);
    let mut monitor = server.connect();
    let features = monitor.negotiate();
    assert_eq!(features & FEATURE_RO, FEATURE_RO);
    assert_eq!(features & (FEATURE_FLUSH | FEATURE_DISCARD), 0);
    assert_eq!(monitor.ask_number(GET_QUEUE_NUM), 3);
    let config = monitor.config(0, 60);
    assert_eq!(config[..8], 64u64.to_le_bytes());
    assert_eq!(config[34..36], 3u16.to_le_bytes());
    // Any window of the configuration space can be read.
    assert_eq!(monitor.config(35, 4), config[35..39]);
}

#[test]
fn a_guest_reads_writes_and_flushes() {
    let server = Server::start(64, &["--writable"]);
    let mut guest = Guest::over(server.connect());
    assert_eq!(read(&mut guest, 7), [7; 512]);
    guest.driver.store(DATA, &[0xaa; 512]);
    let data = Some(Buffer::readable(DATA, 512));
    assert_eq!(request(&mut guest, OUT, 9, data), 0);
    assert_eq!(request(&mut guest, FLUSH, 0, None), 0);
    assert_eq!(read(&mut guest, 9), [0xaa; 512]);
    let disk = server.disk();
    assert_eq!(disk[9 * 512..10 * 512], [0xaa; 512]);
    assert_eq!(disk[10 * 512..11 * 512], [10; 512]);
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let server = Server::start(64, &[]);
    let before = server.disk();
    let mut guest = Guest::over(server.connect());
    guest.driver.store(DATA, &[0xaa; 512]);
    let data = Some(Buffer::readable(DATA, 512));
    assert_eq!(request(&mut guest, OUT, 9, data), 1);
    assert_eq!(server.disk(), before);
}

#[test]
fn the_next_monitor_waits_until_the_first_has_left() {
    let server = Server::start(64, &[]);
    let mut first = Guest::over(server.connect());
    assert_eq!(read(&mut first, 1), [1; 512]);
    let mut second = server.connect();
    second.send(GET_FEATURES, 0, &[], &[]);
    // The first is still served.
    assert_eq!(read(&mut first, 2), [2; 512]);
    drop(first);
    assert_eq!(second.receive().len(), 8);
    drop(second);
    let mut third = Guest::over(server.connect());
    assert_eq!(read(&mut third, 3), [3; 512]);
}

#[test]
fn the_socket_is_removed_at_exit_and_a_stale_one_replaced() {
    let mut server = Server::start(8, &[]);
    let mut monitor = server.connect();
    monitor.negotiate();
    assert!(server.terminate());
    assert!(!server.socket().exists());
    monitor.expect_closed();

    // The socket file that a killed server leaves behind.
    let stale = std::os::unix::net::UnixListener::bind(server.socket()).unwrap();
    // To close it is not enough: a child of another test has it, too, from fork
    // to exec.
    rustix::net::shutdown(&stale, rustix::net::Shutdown::Both).unwrap();
    let mut next = command(server.folder.path(), &[]).spawn().unwrap();
    wait("it listens again", || {
        UnixStream::connect(server.socket()).is_ok()
    });
    next.kill().unwrap();
    next.wait().unwrap();
}

#[test]
fn the_socket_file_appears_only_when_listening() {
    for _ in 0..20 {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk.img"), [0; 512]).unwrap();
        let mut server = command(folder.path(), &[]).spawn().unwrap();
        let socket = folder.path().join("disk.sock");
        wait("the socket appears", || {
            (0..100_000).any(|_| socket.exists())
        });
        UnixStream::connect(&socket).unwrap();
        let names = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(names, 2, "the disk and the socket");
        server.kill().unwrap();
        server.wait().unwrap();
    }
}

#[test]
fn nobody_else_may_connect() {
    // The umask of the caller does not matter.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("disk.img"), [0; 512]).unwrap();
    let program = command(folder.path(), &[]);
    let mut server = std::process::Command::new("sh")
        .args(["-c", "umask 0; exec \"$0\" \"$@\""])
        .arg(program.get_program())
        .args(program.get_args())
        .spawn()
        .unwrap();
    let socket = folder.path().join("disk.sock");
    wait("the socket appears", || socket.exists());
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn unusable_disks_and_arguments_are_refused() {
    let server = Server::start(8, &["--writable"]);
    let refused = |command: &mut std::process::Command| {
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let status = process.wait().unwrap();
        let mut text = String::new();
        process.stderr.unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(status.code(), Some(1), "{text}");
        text
    };
    // The running server has locked the disk.
    assert!(refused(&mut command(server.folder.path(), &[])).contains("in use"));
    let other = tempfile::tempdir().unwrap();
    assert!(refused(&mut command(other.path(), &[])).contains("does not exist"));
    std::fs::write(other.path().join("disk.img"), [0; 512]).unwrap();
    std::fs::write(other.path().join("disk.sock"), "mine").unwrap();
    assert!(refused(&mut command(other.path(), &[])).contains("exists already"));
    let kept = std::fs::read(other.path().join("disk.sock")).unwrap();
    assert_eq!(kept, b"mine");
}
