//! A login on a terminal.

use crate::harness::TIMEOUT;
use crate::node::Node;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::Stdio;

/// Both ends of a pseudo-terminal.
struct Terminal {
    keyboard: File,
    line: File,
    shown: String,
}

impl Terminal {
    fn new(rows: u16, columns: u16) -> Terminal {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let line = OpenOptions::new()
            .read(true)
            .write(true)
            .open(name.to_str().unwrap());
        let terminal = Terminal {
            keyboard: keyboard.into(),
            line: line.unwrap(),
            shown: String::new(),
        };
        terminal.resize(rows, columns);
        terminal
    }

    fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&self.keyboard, size).unwrap();
    }

    fn end(&self) -> Stdio {
        OwnedFd::from(self.line.try_clone().unwrap()).into()
    }

    fn type_line(&mut self, line: &str) {
        self.keyboard
            .write_all(format!("{line}\r").as_bytes())
            .unwrap();
    }

    /// Waits until the terminal shows this text.
    fn wait_for_text(&mut self, text: &str) {
        let timeout = Timespec {
            tv_sec: TIMEOUT.as_secs() as i64,
            tv_nsec: 0,
        };
        while !self.shown.contains(text) {
            let mut ready = [PollFd::new(&self.keyboard, PollFlags::IN)];
            let count = poll(&mut ready, Some(&timeout)).unwrap();
            assert_eq!(count, 1, "timed out waiting for {text:?}: {:?}", self.shown);
            let mut bytes = [0; 4096];
            let count = self.keyboard.read(&mut bytes).unwrap();
            self.shown
                .push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    }
}

#[test]
fn a_login_has_a_terminal_of_the_local_size() {
    let node = Node::start();
    let mut terminal = Terminal::new(33, 111);
    let mut ssh = node
        .jiffy()
        .args(["ssh", "web"])
        .env("TERM", "vt-test")
        .stdin(terminal.end())
        .stdout(terminal.end())
        .stderr(terminal.end())
        .spawn()
        .unwrap();
    // The terminal echoes the input, so the expected text is computed.
    terminal.type_line("PS1=; echo a$((1))z $(stty size) $TERM $0");
    terminal.wait_for_text("a1z 33 111 vt-test -");
    terminal.type_line("echo $((2))tty $SSH_TTY $(tty)");
    terminal.wait_for_text("2tty /dev/pts/");
    terminal.resize(20, 77);
    let pid = Pid::from_raw(ssh.id() as i32).unwrap();
    kill_process(pid, Signal::WINCH).unwrap();
    terminal
        .type_line("until [ \"$(stty size)\" = '20 77' ]; do sleep 0.01; done; echo $((3))resized");
    terminal.wait_for_text("3resized");
    terminal.type_line("exit 9");
    assert_eq!(ssh.wait().unwrap().code(), Some(9));
}

#[test]
fn a_command_has_a_terminal_on_request() {
    let node = Node::start();
    let mut terminal = Terminal::new(30, 90);
    let mut ssh = node
        .jiffy()
        .args(["ssh", "-t", "web", "stty size; exit 3"])
        .stdin(terminal.end())
        .stdout(terminal.end())
        .stderr(terminal.end())
        .spawn()
        .unwrap();
    terminal.wait_for_text("30 90\r\n");
    assert_eq!(ssh.wait().unwrap().code(), Some(3));
}
