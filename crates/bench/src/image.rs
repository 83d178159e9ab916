//! Images from a registry: bytes transferred until the first answer on a node without the
//! image, and the cost of a run compared with `base`.
//!
//! The registry is Debian's and is filled on this host. Jiffy pushes a Debian system with the
//! installed essential packages of this host. A small image is pushed twice: by skopeo as an
//! ordinary layer, and by Jiffy so that nodes fetch its parts on demand.

use crate::figure::{Clock, Figure};
use crate::plan::{BYTES, Case, Kind, Outcome, Sample, WHOLE};
use crate::running::Running;
use crate::verbs::RUN_FACTOR;
use anyhow::{Context, Result, ensure};
use jiffy_machine::image::build::Addition;
use jiffy_registry::testing::{LocalRegistry, RegistryOptions, missing};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Share of the image's bytes in the registry that is transferred until the first answer.
pub const FIRST_ANSWER: &str = "image/first-answer/bytes-share";
/// `jiffy run` of a pulled image, second start.
pub const PULLED: &str = "run/pulled-second/answer";
/// Ratio of its time to that of `base`.
pub const PULLED_RATIO: &str = "run/pulled-second/ratio";
/// The same for an image pushed by Jiffy, which is fetched on demand.
pub const LAZY: &str = "run/pulled-lazy-second/answer";
/// Ratio of its time to that of `base`.
pub const LAZY_RATIO: &str = "run/pulled-lazy-second/ratio";

/// The registry's address in the machine.
pub const HOST: &str = "127.0.0.1:5000";
/// In the machine: the registry's configuration.
pub const CONFIG: &str = "/bench/registry.yml";
/// In the machine: the registry's program.
pub const PROGRAM: &str = "/usr/bin/docker-registry";

const STORAGE: &str = "/bench/registry";
/// A Debian system with the essential packages of the host.
pub const SYSTEM: &str = "bench/system:1";
const SMALL: &str = "bench/small:1";
/// A small image that is fetched on demand; it has only a shell and `true`.
pub const SMALL_LAZY: &str = "bench/small-lazy:1";

/// The registry's program, loader and library.
const FILES: [&str; 3] = [
    PROGRAM,
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/x86_64-linux-gnu/libc.so.6",
];

/// A filled registry and the cases that use it.
pub struct Images {
    /// Files that these cases need in the machine.
    pub additions: Vec<Addition>,
    /// Bytes of the large image in the registry.
    bytes: u64,
}

impl Images {
    /// Fills a registry on this host.
    ///
    /// # Errors
    ///
    /// If the registry, an image or a file can't be made: a program that is needed is missing or
    /// fails.
    pub fn prepare(scratch: &Path) -> Result<Images> {
        let registry = LocalRegistry::start(&RegistryOptions::default())?;
        let small = pack_small(scratch)?;
        let bytes = push_by_jiffy(scratch, &registry, &small)?;
        push_layer(scratch, &registry, &small)?;
        let storage = scratch.join("registry");
        run(Command::new("cp")
            .arg("-r")
            .arg(registry.storage())
            .arg(&storage))?;
        let config = scratch.join("registry.yml");
        std::fs::write(
            &config,
            format!(
                "version: 0.1\nlog: {{ level: error }}\n\
                 storage:\n  filesystem: {{ rootdirectory: {STORAGE} }}\n\
                 http:\n  addr: {HOST}\n"
            ),
        )?;
        let mut additions = vec![
            Addition {
                host: storage,
                guest: STORAGE.into(),
            },
            Addition {
                host: config,
                guest: CONFIG.into(),
            },
        ];
        additions.extend(FILES.map(|path| Addition {
            host: path.into(),
            guest: path.into(),
        }));
        Ok(Images { additions, bytes })
    }

    /// The cases: the transferred share, and second starts of the small images.
    pub fn cases(&self, has_golden: &str, runs: u32) -> Vec<Case> {
        let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
        let second = |name: &str, reference: &str, vm: &str| {
            let image = format!("{HOST}/{reference}");
            let golden = has_golden.replace("golden", &image);
            Case {
                name: name.into(),
                monitor: "jiffy".into(),
                kind: Kind::ToExit {
                    pull: Some(image.clone()),
                    once: Some(words(&["/bin/sh", "-c", &golden])),
                    before: None,
                    argv: words(&["/bin/jiffy", "run", "--name", vm, &image, "--", "true"]),
                    timeline: Some(words(&["/bin/jiffy", "timeline", vm, "--format", "json"])),
                    after: Some(words(&["/bin/jiffy", "rm", "--force", vm])),
                },
                runs: runs * RUN_FACTOR,
                warm_up: 2,
            }
        };
        vec![
            Case {
                name: FIRST_ANSWER.into(),
                monitor: "jiffy".into(),
                kind: Kind::FirstAnswer {
                    reference: format!("{HOST}/{SYSTEM}"),
                    bytes: self.bytes,
                },
                // They vary little, and each is a cold start.
                runs: runs.min(5),
                warm_up: 0,
            },
            second(PULLED, SMALL, "pulled-{run}"),
            second(LAZY, SMALL_LAZY, "lazy-{run}"),
        ]
    }
}

/// Figures of the shares, and ratios if `base` was measured too.
pub fn figures(outcomes: &[Outcome], base: &str) -> Vec<Figure> {
    let of = |case: &str| outcomes.iter().find(|outcome| outcome.name == case);
    let shares = of(FIRST_ANSWER).and_then(|outcome| {
        let share = |counters: &BTreeMap<String, u64>| {
            Some(*counters.get(BYTES)? as f64 / *counters.get(WHOLE)? as f64)
        };
        let samples = outcome.samples.iter();
        let shares = samples.filter_map(|sample| share(&sample.counters));
        Figure::of(
            FIRST_ANSWER,
            "jiffy",
            Clock::Count,
            "share",
            shares.collect(),
        )
    });
    let ratio = |case: &str, name: &str| {
        let (these, base) = of(case).zip(of(base))?;
        let ratios = by_rank(&these.samples, &base.samples);
        Figure::of(name, "jiffy", Clock::Count, "times", ratios)
    };
    let ratios = [ratio(PULLED, PULLED_RATIO), ratio(LAZY, LAZY_RATIO)];
    shares
        .into_iter()
        .chain(ratios.into_iter().flatten())
        .collect()
}

/// Ratios of two cases' times: the faster halves of their runs, compared by rank. On one CPU about
/// every second run takes a million instructions longer, because the end of the previous VM is
/// handled first, so the slower halves are left out. If the cases have different numbers of runs,
/// runs of equal relative rank are compared.
fn by_rank(these: &[Sample], those: &[Sample]) -> Vec<f64> {
    let sorted = |samples: &[Sample]| {
        let mut times: Vec<u64> = samples.iter().map(|it| it.nanoseconds).collect();
        times.sort_unstable();
        times
    };
    let (these, those) = (sorted(these), sorted(those));
    let pairs = these.len().min(those.len());
    // The middle run of each of `pairs` equal parts.
    let at = |times: &[u64], pair: usize| times[(2 * pair + 1) * times.len() / (2 * pairs)];
    (0..pairs.div_ceil(2))
        .map(|pair| at(&these, pair) as f64 / at(&those, pair) as f64)
        .collect()
}

/// Imports this host's Debian and the small image into a node and pushes them to the registry.
/// Returns the bytes of the first in the registry.
fn push_by_jiffy(scratch: &Path, registry: &LocalRegistry, small: &Path) -> Result<u64> {
    let tar = scratch.join("system.tar");
    pack(&tar)?;
    // The path of a socket must be short.
    let sockets = tempfile::tempdir()?;
    let dist = jiffy_testkit::dist();
    let of_node = |program: &str| {
        let mut command = Command::new(dist.join(program));
        command
            .env("JIFFY_MACHINE", "never")
            .env("JIFFY_VM_NETWORK", "off")
            .env("RUST_LOG", "warn")
            .env("JIFFY_DATA", scratch.join("node"))
            .env("JIFFY_RUN", sockets.path());
        command
    };
    let node = |words: &[&str]| run(of_node("bin/jiffy").args(words));
    // A daemon started by `jiffy` would keep running.
    let daemon = of_node("lib/jiffy/jiffyd").stdin(Stdio::null()).spawn();
    let mut daemon = Running(daemon.context("jiffyd")?);
    while UnixStream::connect(sockets.path().join("jiffyd.sock")).is_err() {
        ensure!(daemon.0.try_wait()?.is_none(), "jiffyd ended");
        std::thread::sleep(Duration::from_millis(20));
    }
    let push = |name: &str, tar: &Path, reference: &str| {
        node(&["image", "import", name, &tar.display().to_string()])?;
        node(&["push", name, &format!("{}/{reference}", registry.host())])
    };
    push("system", &tar, SYSTEM)?;
    let bytes = bytes_in(&registry.storage())?;
    push("small", small, SMALL_LAZY)?;
    Ok(bytes)
}

/// A tar of this host's essential packages and their dependencies.
fn pack(tar: &Path) -> Result<()> {
    let format = "${Package}\t${Essential}\t${Pre-Depends}, ${Depends}\t${Provides}\n";
    let output = run(Command::new("dpkg-query").args(["-W", "-f", format]))?;
    let packages = essential(&String::from_utf8_lossy(&output));
    ensure!(!packages.is_empty(), "this host has no essential packages");
    let output = run(Command::new("dpkg-query").arg("-L").args(&packages))?;
    let mut files = BTreeSet::new();
    for line in String::from_utf8_lossy(&output).lines() {
        let path = Path::new(line);
        // dpkg lists some files by paths through links of other packages (/bin).
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            continue;
        };
        if let Ok(folder) = folder.canonicalize()
            && folder.join(name).symlink_metadata().is_ok()
        {
            files.insert(folder.join(name));
        }
    }
    files.extend(["/bin", "/sbin", "/lib", "/lib64", "/proc", "/sys", "/dev"].map(PathBuf::from));
    let mut child = Command::new("tar")
        .args(["--null", "--no-recursion", "--owner=0", "--group=0"])
        .args(["--mtime=@0", "-C", "/", "-T", "-", "-cf"])
        .arg(tar)
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("tar")?;
    let mut names = Vec::new();
    for file in &files {
        names.extend_from_slice(file.strip_prefix("/")?.as_os_str().as_bytes());
        names.push(0);
    }
    child
        .stdin
        .take()
        .context("stdin is piped")?
        .write_all(&names)?;
    ensure!(child.wait()?.success(), "tar failed");
    Ok(())
}

/// The essential packages and their dependencies, from lines of package, essential, dependencies,
/// provides.
fn essential(lines: &str) -> BTreeSet<String> {
    let name = |text: &str| {
        let end = text.find([' ', ':', '(']).unwrap_or(text.len());
        text[..end].to_owned()
    };
    let mut depends = BTreeMap::new();
    let mut provided = BTreeMap::new();
    let mut todo = Vec::new();
    for line in lines.lines() {
        let mut fields = line.split('\t');
        let mut next = || fields.next().unwrap_or_default();
        let (package, essential, needs, provides) = (next(), next(), next(), next());
        if essential == "yes" {
            todo.push(package.to_owned());
        }
        for other in provides.split(',').filter(|other| !other.is_empty()) {
            provided.insert(name(other.trim()), package.to_owned());
        }
        depends.insert(package.to_owned(), needs.to_owned());
    }
    let mut found = BTreeSet::new();
    while let Some(package) = todo.pop() {
        let Some(needs) = depends.get(&package) else {
            continue;
        };
        if !found.insert(package) {
            continue;
        }
        for need in needs.split(',') {
            // Of alternatives, the first that is installed.
            let mut alternatives = need.split('|').map(|text| name(text.trim()));
            todo.extend(
                alternatives.find_map(|name| match depends.contains_key(&name) {
                    true => Some(name),
                    false => provided.get(&name).cloned(),
                }),
            );
        }
    }
    found
}

/// A tar of the small image's root file system, with the same programs as `base`.
fn pack_small(scratch: &Path) -> Result<PathBuf> {
    let root = scratch.join("small");
    for folder in ["bin", "etc", "dev", "proc", "sys", "tmp"] {
        std::fs::create_dir_all(root.join(folder))?;
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox")).context("/bin/busybox")?;
    for applet in ["sh", "true"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet))?;
    }
    std::fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n")?;
    let tar = scratch.join("small.tar");
    run(Command::new("tar")
        .args(["--owner=0", "--group=0", "--mtime=@0", "--sort=name"])
        .arg("-C")
        .arg(&root)
        .arg("-cf")
        .args([&tar, Path::new(".")]))?;
    Ok(tar)
}

/// Pushes an image with one ordinary layer.
fn push_layer(scratch: &Path, registry: &LocalRegistry, tar: &Path) -> Result<()> {
    let layout = scratch.join("layout").display().to_string();
    let image = format!("{layout}:1");
    let umoci = |words: &[&str]| run(Command::new("umoci").args(words));
    umoci(&["init", "--layout", &layout])?;
    umoci(&["new", "--image", &image])?;
    let tar = tar.display().to_string();
    umoci(&["raw", "add-layer", "--image", &image, &tar])?;
    run(Command::new("skopeo")
        .args(["copy", "--quiet", "--dest-tls-verify=false"])
        .arg(format!("oci:{image}"))
        .arg(format!("docker://{}/{SMALL}", registry.host())))?;
    Ok(())
}

/// Total size of the files in a folder, bytes.
fn bytes_in(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        bytes += match entry.file_type()?.is_dir() {
            true => bytes_in(&entry.path())?,
            false => entry.metadata()?.len(),
        };
    }
    Ok(bytes)
}

/// Runs a program of this host and returns its stdout; fails if the program does.
fn run(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| anyhow::anyhow!(missing(&name, &error)))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_compared_rank_by_rank() {
        let samples = |times: &[u64]| -> Vec<Sample> {
            let of = |nanoseconds: &u64| Sample {
                nanoseconds: *nanoseconds,
                ..Sample::default()
            };
            times.iter().map(of).collect()
        };
        // The number of slow runs does not matter, except in the faster half.
        let (base, slower) = (samples(&[10, 20, 10]), samples(&[22, 11, 11]));
        assert_eq!(by_rank(&slower, &base), [1.1, 1.1]);
        let base = samples(&[10, 10, 10, 10]);
        assert_eq!(by_rank(&samples(&[20, 11, 20, 11]), &base), [1.1, 1.1]);
        assert_eq!(by_rank(&samples(&[20, 11, 20, 20]), &base), [1.1, 2.0]);
        // A case that was measured a second time with the same times.
        let once: Vec<u64> = (100..160).collect();
        let twice = [&once[..], &once[..]].concat();
        for (these, those) in [(&once, &twice), (&twice, &once)] {
            let ratios = by_rank(&samples(these), &samples(those));
            assert_eq!(ratios, [1.0; 30]);
        }
        let none = by_rank(&samples(&once), &[]);
        assert!(none.is_empty());
    }

    #[test]
    fn essential_packages_include_their_dependencies() {
        let lines = "bash\tyes\tlibc6 (>= 2.3), base-files\t\n\
                     libc6\tno\tlibgcc-s1:amd64 | other\tlibc\n\
                     libgcc-s1\tno\t, \t\n\
                     mawk\tno\t\tawk\n\
                     base-files\tyes\tgone | awk\t\n\
                     vim\tno\tlibc6\t\n";
        let found: Vec<String> = essential(lines).into_iter().collect();
        assert_eq!(found, ["base-files", "bash", "libc6", "libgcc-s1", "mawk"]);
    }
}
