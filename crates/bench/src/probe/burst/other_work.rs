//! The other work of a node during a burst.

use super::super::node::{JIFFY, jiffy, output};
use super::super::{Running, command, now_ns, wait_for};
use crate::image::{HOST, SYSTEM};
use crate::plan::{Load, SMALL_CACHE};
use crate::verbs::has_golden_of;
use anyhow::{Context, Result, bail, ensure};
use jiffy_content::images::lazy::caches;
use jiffy_content::paths::Paths;
use jiffy_store::bounded::usage;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

/// VMs whose programs never wait, few and many.
const PROGRAMS: [u32; 2] = [4, 16];
/// VMs that write to their disks.
const WRITERS: u32 = 2;
/// RAM of VMs of a kind without a golden snapshot, to which the number of the burst is added.
const NEW_KIND_MIB: u32 = 200;
/// How long no run may begin before the node makes a golden snapshot.
const GOLDEN_QUIET: Duration = Duration::from_secs(1);
/// Copies of 1.35 MiB of text in the memory of the VM that is captured.
const COPIES: u32 = 30;
const SNAPSHOT: &str = "burst-snapshot";
/// Time for which other work runs before the burst.
const BEFORE: Duration = Duration::from_millis(50);
/// Longest time until caches are trimmed: longer than a burst.
const TRIM_TIME: u64 = 60_000_000_000;
/// Reads of an image whose blocks the registry sends on demand: some second, and more than
/// [`SMALL_CACHE`].
const READ: &str = "cat /usr/bin/* | head -c 12M > /dev/null";

/// Other work, from its preparation until it is dropped.
pub(super) struct OtherWork {
    load: Load,
    /// The number of the burst, from 1.
    run: u32,
    /// Names of the VMs that do it.
    pub(super) vms: Vec<String>,
    /// The commands that make them.
    commands: Vec<Running>,
    /// When it began, on the clock of [`now_ns`].
    begun: u64,
}

impl OtherWork {
    /// Other work that has not begun, and whose VMs do not run.
    pub(super) fn new(load: Load, run: u32) -> OtherWork {
        let (name, count) = match load {
            Load::Idle | Load::GoldenSnapshot => ("", 0),
            Load::Programs => ("working", PROGRAMS[0]),
            Load::ManyPrograms => ("working", PROGRAMS[1]),
            Load::Disk => ("writing", WRITERS),
            Load::Compression => ("captured", 1),
            Load::Reading | Load::Trimming => ("reading", 1),
        };
        OtherWork {
            load,
            run,
            vms: super::numbered(name, count),
            commands: Vec::new(),
            begun: 0,
        }
    }

    /// Starts its VMs.
    ///
    /// # Errors
    ///
    /// If a command fails.
    pub(super) fn prepare(&self) -> Result<()> {
        let image = system_image();
        for vm in &self.vms {
            let mut words = vec!["run", "--detach", "--name", vm];
            if self.load == Load::Disk {
                words.push("--root-disk=1G");
            }
            if self.load.needs_registry() {
                words.extend(["--cold", &image, "--", "sleep", "1000"]);
            }
            jiffy(&words)?;
        }
        // Text that differs in each run, so that nothing of an earlier snapshot is used.
        let fill_memory = format!(
            "head -c 1m /dev/urandom | base64 > /tmp/text && echo {} > /tmp/all && \
             for copy in $(seq {COPIES}); do cat /tmp/text; done >> /tmp/all",
            self.run
        );
        let script = match self.load {
            Load::Compression => &fill_memory,
            Load::Trimming => READ,
            _ => return Ok(()),
        };
        for vm in &self.vms {
            jiffy(&["exec", vm, "--", "sh", "-c", script])?;
        }
        Ok(())
    }

    /// Begins it, and gives it time before the burst.
    ///
    /// # Errors
    ///
    /// If a command can't be started.
    pub(super) fn begin(&mut self) -> Result<()> {
        if self.load == Load::GoldenSnapshot {
            let memory = format!("--memory={}M", NEW_KIND_MIB + self.run);
            jiffy(&["run", "--rm", &memory, "--", "true"])?;
            std::thread::sleep(GOLDEN_QUIET);
        }
        self.begun = now_ns();
        for vm in &self.vms {
            let in_vm = |script| vec![JIFFY, "exec", vm, "--", "sh", "-c", script];
            let words = match self.load {
                Load::Compression => vec![JIFFY, "snapshot", "create", vm, SNAPSHOT],
                // The node trims when the VM that used the cache has ended.
                Load::Trimming => vec![JIFFY, "rm", "--force", vm],
                Load::Reading => in_vm(READ),
                Load::Disk => in_vm(
                    "while dd if=/dev/zero of=/flood bs=1M count=16 conv=fsync 2>/dev/null; do :; done",
                ),
                _ => in_vm("while :; do :; done"),
            };
            let words: Vec<String> = words.into_iter().map(String::from).collect();
            let mut command = command(&words)?;
            // The probe's answer is on stdout.
            command.stdout(Stdio::null());
            self.commands.push(Running(command.spawn().context(JIFFY)?));
        }
        if self.load != Load::Idle {
            std::thread::sleep(BEFORE);
        }
        Ok(())
    }

    /// Whether it goes on until it is dropped.
    pub(super) fn is_endless(&self) -> bool {
        match self.load {
            Load::Idle | Load::Programs | Load::ManyPrograms | Load::Disk => true,
            Load::Compression | Load::GoldenSnapshot | Load::Reading | Load::Trimming => false,
        }
    }

    /// Fails if endless work has ended.
    ///
    /// # Errors
    ///
    /// See above.
    pub(super) fn check_goes_on(&mut self) -> Result<()> {
        for command in &mut self.commands {
            let status = command.0.try_wait()?;
            ensure!(
                status.is_none(),
                "a program that never ends ended: {status:?}"
            );
        }
        Ok(())
    }

    /// Waits until it is done; returns how long it took, in nanoseconds.
    ///
    /// # Errors
    ///
    /// If a command failed, or caches are not trimmed in a minute.
    pub(super) fn wait(&mut self) -> Result<u64> {
        for command in &mut self.commands {
            let status = command.0.wait()?;
            ensure!(status.success(), "other work failed: {status}");
        }
        match self.load {
            Load::GoldenSnapshot => wait_for(&[
                "/bin/sh".into(),
                "-c".into(),
                has_golden_of(NEW_KIND_MIB + self.run),
            ])?,
            Load::Trimming => wait_until_trimmed()?,
            _ => {}
        }
        Ok(now_ns() - self.begun)
    }

    /// Removes what it left on the node.
    pub(super) fn remove(&mut self) {
        self.commands.clear();
        // If this fails, there is nothing to remove.
        for vm in &self.vms {
            let _ = output(&["rm", "--force", vm]);
        }
        match self.load {
            Load::Compression => drop(output(&["snapshot", "rm", SNAPSHOT])),
            Load::Reading | Load::Trimming => drop(output(&["image", "rm", &system_image()])),
            _ => {}
        }
    }
}

/// The image that is read: Debian's essential packages, pushed by Jiffy.
pub(super) fn system_image() -> String {
    format!("{HOST}/{SYSTEM}")
}

/// Waits until the caches of the machine's daemon are within their limit.
fn wait_until_trimmed() -> Result<()> {
    let none = PathBuf::new;
    let paths = Paths {
        data: "/var/lib/jiffy".into(),
        run: none(),
        lib: none(),
        share: none(),
        socket: none(),
        peer: None,
    };
    let until = now_ns() + TRIM_TIME;
    loop {
        let bytes = usage(&caches(&paths));
        if bytes <= SMALL_CACHE {
            return Ok(());
        }
        if now_ns() > until {
            bail!("the caches still have {bytes} bytes");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
