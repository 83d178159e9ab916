//! Guests on a network: VMMs with TAP interfaces in the test's network namespace, and Linux with
//! `jiffy-init` in the guests. Needs KVM and the right to make namespaces; `jiffy-lab run-tests`
//! runs it in a machine.
#![allow(unsafe_code)] // unshare(2).

use jiffy_kernel::command_line::console_command_line;
use jiffy_sys::tap::{Tap, TapOptions};
use jiffy_testkit::monitor;
use jiffy_wire::agent::{AGENT_PORT, Command as GuestCommand, Done, OLDEST, Request};
use jiffy_wire::frame;
use jiffy_wire::guest::{self, GuestConfig, HostEntry, Interface, Neighbour, Root};
use jiffy_wire::vmm::{
    self, Boot, Disk, FwCfgContents, FwCfgFile, Memory, Net, NetBackend, NewGeneration, PageSize,
    Serial, VmmConfig, Vsock,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(100);
const HOST: &str = "10.9.0.1";
const HOST6: &str = "fd09::1";
const HOST_MAC: &str = "02:4a:46:ff:ff:01";

/// Creates a network namespace for this thread and the programs that it starts.
fn own_namespace() {
    // SAFETY: a network namespace has nothing to do with memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .expect("the right to unshare");
    ip("link set lo up");
    // The guests' gateway: an address of the host on no link.
    ip(&format!("addr add {HOST}/32 dev lo"));
    ip(&format!("addr add {HOST6}/128 dev lo"));
}

fn ip(arguments: &str) {
    let status = Command::new("busybox")
        .arg("ip")
        .args(arguments.split(' '))
        .status()
        .expect("busybox");
    assert!(status.success(), "ip {arguments}");
}

/// Addresses of a VM: number N has 10.9.0.N and fd09::N.
struct Addresses {
    number: u8,
    tap: OwnedFd,
}

impl Addresses {
    fn new(number: u8) -> Addresses {
        let name = format!("jiffy{number}");
        let options = TapOptions {
            name: &CString::new(name.as_str()).unwrap(),
            queues: 1,
            owner: None,
            offloads: false,
            persistent: false,
        };
        let tap = Tap::create(&options).expect("a TAP").queues.remove(0);
        rustix::io::fcntl_setfd(&tap, rustix::io::FdFlags::empty()).unwrap();
        let place = Addresses { number, tap };
        ip(&format!("link set {name} address {HOST_MAC}"));
        ip(&format!("link set {name} up"));
        ip(&format!("route add {}/32 dev {name}", place.address()));
        ip(&format!("-6 route add {}/128 dev {name}", place.address6()));
        place
    }

    fn address(&self) -> IpAddr {
        [10, 9, 0, self.number].into()
    }

    fn address6(&self) -> IpAddr {
        format!("fd09::{:x}", self.number).parse().unwrap()
    }

    fn mac(&self) -> String {
        format!("02:4a:46:00:00:{:02x}", self.number)
    }

    fn device(&self) -> Net {
        Net {
            mac: self.mac().parse().unwrap(),
            mtu: Some(1500),
            backend: NetBackend::Tap(vec![self.tap.as_raw_fd()]),
            guard: None,
            receive_limit: Default::default(),
            send_limit: Default::default(),
        }
    }

    fn guest(&self, script: &str) -> GuestConfig {
        let gateways = [HOST, HOST6].map(String::from);
        GuestConfig {
            version: guest::VERSION,
            vm_id: format!("vm{}", self.number),
            hostname: Some(format!("guest{}", self.number)),
            root: Root::Overlay {
                device: "/dev/vda".into(),
                fstype: "erofs".into(),
                upper: None,
            },
            interfaces: vec![Interface {
                name: "eth0".into(),
                addresses: vec![self.address().to_string(), self.address6().to_string()],
                neighbours: gateways
                    .iter()
                    .map(|address| Neighbour {
                        address: address.clone(),
                        mac: HOST_MAC.parse().unwrap(),
                    })
                    .collect(),
                gateways: gateways.to_vec(),
                mtu: None,
                mac: Some(self.mac().parse().unwrap()),
            }],
            name_servers: vec![HOST.into()],
            search: vec!["lan.example".into()],
            hosts: vec![HostEntry {
                address: self.address().to_string(),
                names: vec![format!("guest{}", self.number)],
            }],
            main: Some(GuestCommand {
                argv: ["sh", "-c", script].map(String::from).to_vec(),
                ..GuestCommand::default()
            }),
            ..GuestConfig::default()
        }
    }

    fn dial(&self, port: u16) -> TcpStream {
        connect((self.address(), port).into())
    }
}

/// Connects to a server that may not listen yet.
fn connect(address: SocketAddr) -> TcpStream {
    let until = Instant::now() + TIMEOUT;
    loop {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => {
                stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                return stream;
            }
            Err(error) => assert!(Instant::now() < until, "{address}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn listen(port: u16) -> TcpListener {
    TcpListener::bind((HOST, port)).unwrap()
}

/// Accepts one connection; panics if none comes within the time limit.
fn accept(listener: &TcpListener) -> TcpStream {
    let timeout = Timespec::try_from(TIMEOUT).unwrap();
    let mut ready = [PollFd::new(listener, PollFlags::IN)];
    let count = poll(&mut ready, Some(&timeout)).unwrap();
    assert_eq!(count, 1, "nobody connected to {listener:?}");
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn read_all(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// A VMM and its folder.
struct Vm {
    folder: PathBuf,
    monitor: Child,
}

impl Vm {
    fn start(folder: &Path, name: &str, mut config: VmmConfig) -> Vm {
        let folder = folder.join(name);
        fs::create_dir_all(&folder).unwrap();
        config.vsock = Some(Vsock {
            cid: 3,
            path: folder.join("vsock.sock"),
        });
        config.serial = Some(Serial::File(folder.join("console")));
        config.control = Some(folder.join("control.sock"));
        let file = folder.join("vmm.json");
        fs::write(&file, serde_json::to_vec(&config).unwrap()).unwrap();
        let monitor = Command::new("/lib/jiffy/jiffy-vmm")
            .args(["run", "--config"])
            .arg(file)
            .spawn()
            .expect("jiffy-vmm");
        Vm { folder, monitor }
    }

    /// Freezes the guest's programs for as long as the returned connection is open.
    fn quiesce(&self) -> UnixStream {
        let mut stream = UnixStream::connect(self.folder.join("vsock.sock")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        writeln!(stream, "CONNECT {AGENT_PORT}").unwrap();
        let mut answer = String::new();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        reader.read_line(&mut answer).unwrap();
        assert!(answer.starts_with("OK "), "{answer}");
        let request = Request::Quiesce {
            version: OLDEST,
            drop_caches: false,
        };
        stream.write_all(&frame::to_vec(&request).unwrap()).unwrap();
        let mut decoder = frame::Decoder::new();
        loop {
            let mut bytes = [0; 512];
            let count = reader.read(&mut bytes).unwrap();
            assert!(count > 0, "the agent hung up");
            decoder.push(&bytes[..count]);
            if let Some(done) = decoder.next::<Done>().unwrap() {
                assert!(matches!(done, Done::Ok), "{done:?}");
                return stream;
            }
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.monitor.kill();
        let _ = self.monitor.wait();
        if std::thread::panicking() {
            let console = fs::read(self.folder.join("console")).unwrap_or_default();
            let end = &console[console.len().saturating_sub(3000)..];
            println!("{}", String::from_utf8_lossy(end));
        }
    }
}

fn config(place: &Addresses, script: &str, root: &Path) -> VmmConfig {
    let guest = serde_json::to_string(&place.guest(script)).unwrap();
    VmmConfig {
        version: vmm::VERSION,
        id: "network".into(),
        vcpus: 1,
        memory: Memory {
            size_mib: 128,
            pages: PageSize::Small,
            prefault: false,
        },
        boot: Boot {
            kernel: "/share/jiffy/kernels/base/vmlinux".into(),
            initrd: Some("/share/jiffy/initramfs.cpio".into()),
            command_line: console_command_line(),
        },
        disks: vec![Disk {
            path: root.into(),
            read_only: true,
            ..Disk::default()
        }],
        vsock: None,
        rng: true,
        serial: None,
        fw_cfg: vec![FwCfgFile {
            name: guest::FW_CFG_NAME.into(),
            contents: FwCfgContents::Text(guest),
        }],
        control: None,
        exit_record: None,
        balloon: false,
        usable_memory_mib: None,
        nets: vec![place.device()],
        folders: Vec::new(),
        handed: Vec::new(),
        cpu_profile: None,
        record_activity: false,
        restore: None,
    }
}

/// The base image as a disk file.
fn root(folder: &Path) -> PathBuf {
    let tar = File::open("/share/jiffy/images/base.tar").unwrap();
    let image = folder.join("root.erofs");
    jiffy_rootfs::import_tar(tar, &image, jiffy_rootfs::Limits::default()).unwrap();
    image
}

#[test]
#[ignore = "needs a real KVM here"]
fn a_guest_is_reached_and_reaches_others() {
    own_namespace();
    let folder = tempfile::tempdir().unwrap();
    let place = Addresses::new(2);
    let hello = listen(9000);
    let script = format!(
        "(cat /etc/resolv.conf /etc/hosts; cat /sys/class/net/eth0/address; \
          ip -6 addr show dev eth0 | grep -c tentative) | nc {HOST} 9000; \
         nc -ll -p 8080 -e head -c 3000000 /dev/zero & \
         nc -ll -p 8081 -e wc -c & \
         nc -ll -p 8082 -e cat & wait"
    );
    let vm = Vm::start(
        folder.path(),
        "one",
        config(&place, &script, &root(folder.path())),
    );
    let said = read_all(&mut accept(&hello));
    assert!(
        said.starts_with(&format!("nameserver {HOST}\nsearch lan.example\n")),
        "{said}"
    );
    assert!(said.contains("10.9.0.2\tguest2\n"), "{said}");
    assert!(said.ends_with(&format!("{}\n0\n", place.mac())), "{said}");

    // Segmentation and checksum offload in both directions.
    let mut stream = place.dial(8080);
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), 3_000_000);
    assert!(received.iter().all(|byte| *byte == 0));
    let mut stream = place.dial(8081);
    stream.write_all(&vec![7; 3_000_000]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut stream).trim(), "3000000");
    let pattern: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    let mut stream = connect((place.address6(), 8082).into());
    let mut writer = stream.try_clone().unwrap();
    let expected = pattern.clone();
    let sender = std::thread::spawn(move || {
        writer.write_all(&pattern).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    received.clear();
    stream.read_to_end(&mut received).unwrap();
    sender.join().unwrap();
    assert!(received == expected);

    for address in [place.address(), place.address6()] {
        let mut ping = Command::new("busybox");
        ping.arg(if address.is_ipv6() { "ping6" } else { "ping" });
        let status = ping
            .args(["-c", "3", "-W", "20", &address.to_string()])
            .status()
            .unwrap();
        assert!(status.success(), "{address}");
    }
    let mut descriptors = Vec::new();
    let stats = monitor::ask(
        &vm.folder.join("control.sock"),
        &vmm::ControlRequest::Stats,
        &mut descriptors,
    )
    .unwrap();
    let vmm::ControlResponse::Stats(stats) = stats else {
        panic!("{stats:?}");
    };
    assert!(stats["net0_sent_bytes"] > 3_000_000, "{stats:?}");
    assert!(stats["net0_received_bytes"] > 3_000_000, "{stats:?}");
    assert_eq!(stats["net0_sent_spoofed"], 0, "{stats:?}");
    // Frames are larger than a packet on average: segments were not split.
    assert!(
        stats["net0_sent_bytes"] / stats["net0_sent_frames"] > 1514,
        "{stats:?}"
    );
}

#[test]
#[ignore = "needs a real KVM here"]
fn a_clone_has_new_addresses_and_its_connections_are_reset() {
    own_namespace();
    let folder = tempfile::tempdir().unwrap();
    let (parent, clone) = (Addresses::new(2), Addresses::new(3));
    let (calls, ends) = (listen(9001), listen(9002));
    // An outgoing connection stays open until it is reset; then the guest sends its identity to
    // another port. The connection's input is a FIFO that never ends, so the shell waits for no
    // other program.
    let script = format!(
        "nc -ll -p 8080 -e hostname & \
         mkfifo /tmp/input; exec 3<>/tmp/input; nc {HOST} 9001 <&3 >/tmp/heard; \
         (hostname; cat /sys/class/net/eth0/address; ip addr show dev eth0) | nc {HOST} 9002; wait"
    );
    let root = root(folder.path());
    let vm = Vm::start(folder.path(), "parent", config(&parent, &script, &root));
    let mut call = accept(&calls);
    assert_eq!(read_all(&mut parent.dial(8080)).trim(), "guest2");

    let quiet = vm.quiesce();
    let captured = monitor::capture(&vm.folder.join("control.sock"), true).unwrap();
    drop(quiet);
    let mut restored = config(&clone, "true", &root);
    let mut restore = captured.for_child().unwrap();
    restore.generation = Some(NewGeneration {
        id: "0f8fad5b-d9cb-469f-a165-70867728950e".into(),
        start_main: false,
        deadline_ms: 200_000,
    });
    restored.restore = Some(restore);
    let _other = Vm::start(folder.path(), "clone", restored);

    // The clone's connection was reset; the clone reports that from its own address.
    let mut end = accept(&ends);
    assert_eq!(end.peer_addr().unwrap().ip(), clone.address());
    let said = read_all(&mut end);
    assert!(
        said.starts_with(&format!("guest3\n{}\n", clone.mac())),
        "{said}"
    );
    assert!(
        said.contains("10.9.0.3/32") && said.contains("fd09::3/128"),
        "{said}"
    );
    assert!(said.contains("fe80::4a:46ff:fe00:3/64"), "{said}");
    assert!(
        !said.contains("10.9.0.2") && !said.contains("fd09::2"),
        "{said}"
    );
    assert!(!said.contains("fe80::4a:46ff:fe00:2"), "{said}");
    // A listening server still listens.
    assert_eq!(read_all(&mut clone.dial(8080)).trim(), "guest3");
    assert_eq!(
        read_all(&mut connect((clone.address6(), 8080).into())).trim(),
        "guest3"
    );

    // The parent and its connection are not affected.
    call.set_nonblocking(true).unwrap();
    let nothing = call.read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    call.set_nonblocking(false).unwrap();
    call.write_all(b"still there").unwrap();
    assert_eq!(read_all(&mut parent.dial(8080)).trim(), "guest2");
}
