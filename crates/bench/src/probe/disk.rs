//! How fast a guest reads its disk.

use super::{DATA, Running, command, cpu_ns, kvm_counters, now_ns};
use crate::disk::{BYTES, COLD_FILE, PIECE_SEQUENTIAL, RAM_DISK_MODULE, WARM_FILE};
use crate::plan::{FAILURE, MARKER, Sample};
use anyhow::{Context, Result, bail};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// From the guest's first mark to its second.
pub fn read(argv: &[String], warm: bool) -> Result<Sample> {
    prepare(warm)?;
    let mut command = command(argv)?;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running(command.spawn().with_context(|| argv.join(" "))?);
    let mut marks = Marks {
        output: child.0.stdout.take().context("stdout is piped")?,
        early: 0,
    };
    let pid = child.0.id();
    marks.next(&mut child)?;
    let start = now_ns();
    let (exits, cpu) = (kvm_counters(pid), cpu_ns(pid)?);
    marks.next(&mut child)?;
    let end = now_ns();
    let mut counters = kvm_counters(pid);
    for (name, value) in &mut counters {
        *value = value.saturating_sub(exits.get(name).copied().unwrap_or(0));
    }
    counters.insert("cpu_ns".into(), cpu_ns(pid)? - cpu);
    Ok(Sample {
        nanoseconds: end - start,
        counters,
        ..Sample::default()
    })
}

/// Makes a root disk's layer: an empty file system in a new file.
pub fn create_root(bytes: u64) -> Result<Sample> {
    let path = Path::new(DATA).join("root.img");
    fs::create_dir_all(DATA)?;
    let start = now_ns();
    let mut options = jiffy_ext4::Options {
        bytes,
        label: "root".to_owned(),
        created: start as u32,
        ..jiffy_ext4::Options::default()
    };
    rustix::rand::getrandom(&mut options.uuid, rustix::rand::GetRandomFlags::empty())?;
    rustix::rand::getrandom(
        &mut options.hash_seed,
        rustix::rand::GetRandomFlags::empty(),
    )?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    jiffy_ext4::format(&file, &options)?;
    drop(file);
    let end = now_ns();
    fs::remove_file(&path)?;
    Ok(Sample {
        nanoseconds: end - start,
        ..Sample::default()
    })
}

/// The guest's marks among its output.
struct Marks<R> {
    output: R,
    /// Marks that came together with an earlier one.
    early: usize,
}

impl<R: Read> Marks<R> {
    fn next(&mut self, child: &mut Running) -> Result<()> {
        let mut bytes = [0; 256];
        while self.early == 0 {
            let got = self.output.read(&mut bytes)?;
            if got == 0 {
                let mut message = String::new();
                if let Some(stderr) = &mut child.0.stderr {
                    stderr.take(4096).read_to_string(&mut message)?;
                }
                bail!("it ended before it had read: {}", message.trim());
            }
            let bytes = &bytes[..got];
            if let Some(at) = bytes.iter().position(|byte| *byte == FAILURE) {
                let mut rest = bytes[at + 1..].to_vec();
                while !rest.contains(&b'\n') {
                    let mut byte = [0];
                    self.output.read_exact(&mut byte)?;
                    rest.push(byte[0]);
                }
                bail!("in the guest: {}", String::from_utf8_lossy(&rest).trim());
            }
            self.early = bytes.iter().filter(|byte| **byte == MARKER).count();
        }
        self.early -= 1;
        Ok(())
    }
}

/// The file with its contents, in the page cache or not.
fn prepare(warm: bool) -> Result<()> {
    let path = Path::new(if warm { WARM_FILE } else { COLD_FILE });
    if !path.exists() {
        if !warm {
            load_ram_disk()?;
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create(warm)
            .truncate(warm)
            .open(path)?;
        let piece: Vec<u8> = (0..PIECE_SEQUENTIAL)
            .map(|byte| (byte % 251) as u8 | 2)
            .collect();
        // A piece more than is measured.
        for _ in 0..BYTES / PIECE_SEQUENTIAL as u64 + 1 {
            file.write_all(&piece)?;
        }
        file.sync_all()?;
    }
    if !warm {
        // proc_sys_vm: the page cache.
        rustix::fs::sync();
        fs::write("/proc/sys/vm/drop_caches", "1")?;
        let text = fs::read_to_string("/proc/meminfo")?;
        let buffers = text.lines().find_map(|line| line.strip_prefix("Buffers:"));
        let kib = buffers.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        if kib.is_none_or(|kib| kib > 1024) {
            bail!("the page cache of {} could not be emptied", path.display());
        }
    }
    Ok(())
}

fn load_ram_disk() -> Result<()> {
    let kib = (BYTES + PIECE_SEQUENTIAL as u64) / 1024;
    let status = Command::new("insmod")
        .args([RAM_DISK_MODULE, "rd_nr=1", &format!("rd_size={kib}")])
        .status()?;
    if !status.success() {
        bail!("the module of RAM disks can't be loaded");
    }
    let _ = File::open(COLD_FILE).with_context(|| COLD_FILE)?;
    Ok(())
}
