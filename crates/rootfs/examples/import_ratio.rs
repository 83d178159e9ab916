//! Compares the cost of an import with that of `umoci unpack` and `mkfs.erofs`.
//!
//! ```text
//! import_ratio [--mib 200] [--rounds 5] [--json]
//! ```
//!
//! umoci makes an image of three gzip layers with that many MiB of files, the same image in each
//! run. Both ways then run in turn, each as a process of its own, and the medians are compared.
//! Jiffy's import syncs the image to disk; the other way syncs nothing.

use jiffy_rootfs::{Choice, Limits, Source, import};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [ours, layout, out] = &arguments[..]
        && ours == "ours"
    {
        return import_here(Path::new(layout), Path::new(out));
    }
    let number = |name: &str, default: u64| -> Result<u64> {
        match arguments.iter().position(|argument| argument == name) {
            Some(at) => Ok(arguments
                .get(at + 1)
                .ok_or("a number is missing")?
                .parse()?),
            None => Ok(default),
        }
    };
    let (mib, rounds) = (number("--mib", 200)?, number("--rounds", 5)?.max(1));
    let scratch = tempfile::tempdir()?;
    make_image(scratch.path(), mib)?;
    let (mut ours, mut by_hand) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        by_hand.push(run_by_hand(scratch.path())?);
        ours.push(run_ours(scratch.path())?);
    }
    if arguments.iter().any(|argument| argument == "--json") {
        // One ratio per round: load on the host slows both runs of a round.
        let ratios = |of: fn(&Cost) -> Duration| {
            let pairs = ours.iter().zip(&by_hand);
            let ratio = |(ours, by_hand): (&Cost, &Cost)| {
                let ratio = of(ours).as_secs_f64() / of(by_hand).as_secs_f64();
                format!("{ratio:.3}")
            };
            pairs.map(ratio).collect::<Vec<_>>().join(", ")
        };
        let (wall, cpu) = (ratios(|cost| cost.wall), ratios(|cost| cost.cpu));
        println!("{{\"wall_ratios\": [{wall}], \"cpu_ratios\": [{cpu}]}}");
        return Ok(());
    }
    let (ours, by_hand) = (Cost::median(ours), Cost::median(by_hand));
    let ratio = |of: fn(&Cost) -> Duration| of(&ours).as_secs_f64() / of(&by_hand).as_secs_f64();
    let (wall, cpu) = (ratio(|cost| cost.wall), ratio(|cost| cost.cpu));
    println!("{mib} MiB in three gzip layers, median of {rounds}:");
    println!("  umoci unpack + mkfs.erofs  {by_hand}");
    println!("  jiffy import               {ours}");
    println!("  ratio                      {wall:.2} of wall time, {cpu:.2} of CPU time");
    Ok(())
}

fn import_here(layout: &Path, out: &Path) -> Result<()> {
    let source = Source::open(layout, &Choice::new(out.parent().ok_or("no folder")?))?;
    import(source, out, &Limits::default(), &mut |_| {
        ControlFlow::Continue(())
    })?;
    Ok(())
}

fn run_ours(scratch: &Path) -> Result<Cost> {
    let cost = measured(|| {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("ours")
            .arg(scratch.join("oci"))
            .arg(scratch.join("ours.erofs"));
        run(&mut command)
    })?;
    fs::remove_file(scratch.join("ours.erofs"))?;
    Ok(cost)
}

fn run_by_hand(scratch: &Path) -> Result<Cost> {
    let cost = measured(|| {
        let mut unpack = Command::new("umoci");
        unpack
            .current_dir(scratch)
            .args(["unpack", "--image", "oci:v1"]);
        if !rustix::process::geteuid().is_root() {
            unpack.arg("--rootless");
        }
        run(unpack.arg("bundle"))?;
        let mut make = Command::new("mkfs.erofs");
        run(make
            .current_dir(scratch)
            .args(["hand.erofs", "bundle/rootfs"]))
    })?;
    fs::remove_dir_all(scratch.join("bundle"))?;
    fs::remove_file(scratch.join("hand.erofs"))?;
    Ok(cost)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?} can't be run (see scripts/setup): {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(format!("{command:?} failed: {words}").into())
    }
}

struct Cost {
    wall: Duration,
    cpu: Duration,
}

impl Cost {
    fn median(mut costs: Vec<Cost>) -> Cost {
        let mut median = |of: fn(&Cost) -> Duration| {
            costs.sort_by_key(of);
            of(&costs[costs.len() / 2])
        };
        Cost {
            wall: median(|cost| cost.wall),
            cpu: median(|cost| cost.cpu),
        }
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.2} s wall, {:.2} s CPU",
            self.wall.as_secs_f64(),
            self.cpu.as_secs_f64()
        )
    }
}

fn measured(work: impl FnOnce() -> Result<()>) -> Result<Cost> {
    let (start, before) = (Instant::now(), children_cpu()?);
    work()?;
    Ok(Cost {
        wall: start.elapsed(),
        cpu: children_cpu()? - before,
    })
}

/// CPU time of all children that have exited (`proc(5)`, `/proc/pid/stat`).
fn children_cpu() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let after_name = stat
        .rsplit_once(") ")
        .ok_or("/proc/self/stat has an unexpected format")?
        .1;
    let fields: Vec<&str> = after_name.split(' ').collect();
    let ticks: u64 = fields[13].parse::<u64>()? + fields[14].parse::<u64>()?;
    Ok(Duration::from_millis(ticks * 10))
}

/// Three layers: a base, a large addition, and changes to both.
fn make_image(scratch: &Path, mib: u64) -> Result<()> {
    let umoci =
        |arguments: &[&str]| run(Command::new("umoci").current_dir(scratch).args(arguments));
    umoci(&["init", "--layout", "oci"])?;
    umoci(&["new", "--image", "oci:v1"])?;
    let mut random = Random(42);
    let bytes = mib << 20;
    for (layer, share) in [(0, bytes / 2), (1, bytes * 2 / 5), (2, bytes / 10)] {
        let tar = scratch.join("layer.tar");
        let mut builder = tar::Builder::new(fs::File::create(&tar)?);
        let mut left = share;
        let mut count = 0;
        while left > 0 {
            let size = random.file_size().min(left);
            // Half of the last layer's files replace files of the first layer.
            let of = if layer == 2 && count % 2 == 0 {
                0
            } else {
                layer
            };
            let path = format!("usr/lib/{of}/{}/file-{count}", count % 97);
            let mut header = tar::Header::new_gnu();
            header.set_size(size);
            header.set_mode(0o644);
            header.set_mtime(1_700_000_000);
            builder.append_data(&mut header, path, random.contents(size).as_slice())?;
            (left, count) = (left - size, count + 1);
        }
        builder.into_inner()?;
        umoci(&["raw", "add-layer", "--image", "oci:v1", "layer.tar"])?;
        fs::remove_file(tar)?;
    }
    Ok(())
}

/// xorshift64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A distribution's sizes: most files are small, most bytes are in large files.
    fn file_size(&mut self) -> u64 {
        let magnitude = 7 + self.next() % 15;
        self.next() % (1 << magnitude)
    }

    /// Contents that compress to about two fifths, as programs do.
    fn contents(&mut self, size: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(size as usize + 64);
        while (out.len() as u64) < size {
            let word = self.next();
            match word % 8 {
                0..=3 => out.extend_from_slice(&word.to_le_bytes()[..3]),
                4 | 5 => out.extend_from_slice(b"\0\0\0\0\x48\x8b\x05"),
                _ => {
                    let back = out.len().saturating_sub((word >> 8) as usize % 4096);
                    let end = (back + 12).min(out.len());
                    out.extend_from_within(back..end);
                }
            }
        }
        out.truncate(size as usize);
        out
    }
}
