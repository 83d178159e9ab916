//! The kernels built or installed on this machine.
//!
//! `kernel/build` makes a folder `FLAVOUR-HASH` for each kernel (an installed kernel has a folder
//! named by its flavour only) with `vmlinux`, `config` and `meta.json`, and in the cache also
//! `vmlinux.debug` and `System.map`.

use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Version of `meta.json` that is read.
const META_FORMAT: u32 = 1;
/// Largest `meta.json`, bytes; they have some 400.
const MAX_META: u64 = 64 << 10;

/// Purpose for which a kernel is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flavour {
    /// Ordinary guests.
    Base,
    /// Guests in which Docker runs.
    Full,
    /// A neutral kernel for comparisons of VMMs.
    Plain,
    /// The machine's, with sched_ext.
    Sched,
}

impl Flavour {
    /// All flavours in display order.
    pub const ALL: [Self; 4] = [Self::Base, Self::Full, Self::Plain, Self::Sched];

    /// Its name in `kernel/build`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Full => "full",
            Self::Plain => "plain",
            Self::Sched => "sched",
        }
    }
}

impl fmt::Display for Flavour {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// An unknown flavour.
#[derive(Debug, thiserror::Error)]
#[error("there is no kernel flavour '{0}'; choose base, full, plain or sched")]
pub struct UnknownFlavour(String);

impl FromStr for Flavour {
    type Err = UnknownFlavour;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|flavour| flavour.name() == name)
            .ok_or_else(|| UnknownFlavour(name.to_owned()))
    }
}

/// Where a kernel was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Built on this machine.
    Cache,
    /// Installed with Jiffy.
    Installed,
}

/// A kernel that can be booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kernel {
    /// `FLAVOUR-HASH`.
    pub name: String,
    /// Its purpose.
    pub flavour: Flavour,
    /// Hash of everything that the build uses.
    pub hash: String,
    /// Its release, as `uname -r` prints it.
    pub release: String,
    /// Package and version of its source.
    pub source: String,
    /// Size of the image, bytes.
    pub bytes: u64,
    /// When it was built, seconds since 1970.
    pub built: u64,
    /// Where it was found.
    pub origin: Origin,
    /// The image to boot.
    pub vmlinux: PathBuf,
}

/// A kernel's folder that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Broken {
    /// The folder.
    pub folder: PathBuf,
    /// What is wrong, as the end of a sentence.
    pub problem: String,
}

/// The kernels that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Kernels {
    /// Usable kernels, by flavour, the newest first.
    pub kernels: Vec<Kernel>,
    /// Folders that can't be used.
    pub broken: Vec<Broken>,
}

impl Kernels {
    /// The newest kernel of a flavour; one built on this machine is preferred to an installed one.
    pub fn newest(&self, flavour: Flavour) -> Option<&Kernel> {
        let of_flavour = |origin| {
            self.kernels
                .iter()
                .find(move |kernel| kernel.flavour == flavour && kernel.origin == origin)
        };
        of_flavour(Origin::Cache).or_else(|| of_flavour(Origin::Installed))
    }

    /// The kernel with this name, or the only one whose name has this prefix.
    pub fn named(&self, name: &str) -> Option<&Kernel> {
        if let Some(kernel) = self.kernels.iter().find(|kernel| kernel.name == name) {
            return Some(kernel);
        }
        let mut matching = self
            .kernels
            .iter()
            .filter(|kernel| kernel.name.starts_with(name));
        matching.next().filter(|_| matching.next().is_none())
    }
}

/// A folder of kernels can't be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the kernels in {folder}")]
pub struct ListError {
    /// The folder.
    pub folder: PathBuf,
    /// The system's error.
    #[source]
    pub source: std::io::Error,
}

/// The folder of `kernel/build`'s results: `$XDG_CACHE_HOME/jiffy/kernel`, or the same in
/// `~/.cache`. `None` without a home.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("jiffy/kernel"))
}

/// Lists the kernels in these folders. A folder that does not exist is empty; a kernel that can't
/// be used is listed as broken.
///
/// # Errors
///
/// If a folder exists and can't be read.
pub fn list(folders: &[(Origin, &Path)]) -> Result<Kernels, ListError> {
    let mut found = Kernels::default();
    for &(origin, folder) in folders {
        let failed = |source| ListError {
            folder: folder.to_owned(),
            source,
        };
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if !is_kernel_name(&name) {
                continue;
            }
            match read(&entry.path(), &name, origin) {
                Ok(kernel) => found.kernels.push(kernel),
                Err(problem) => found.broken.push(Broken {
                    folder: entry.path(),
                    problem,
                }),
            }
        }
    }
    found.kernels.sort_by(|a, b| {
        (a.flavour as u8, b.built, &a.name).cmp(&(b.flavour as u8, a.built, &b.name))
    });
    found.broken.sort_by(|a, b| a.folder.cmp(&b.folder));
    Ok(found)
}

/// Whether a name has the form `base-0123456789abcdef` or `base`.
fn is_kernel_name(name: &str) -> bool {
    let (flavour, hash) = name.split_once('-').unwrap_or((name, "0"));
    let hexadecimal = !hash.is_empty() && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    hexadecimal && flavour.parse::<Flavour>().is_ok()
}

#[derive(Deserialize)]
struct Meta {
    format: u32,
    flavour: Flavour,
    hash: String,
    release: String,
    source: String,
    bytes: u64,
}

fn read(folder: &Path, folder_name: &str, origin: Origin) -> Result<Kernel, String> {
    let mut text = String::new();
    File::open(folder.join("meta.json"))
        .and_then(|file| file.take(MAX_META).read_to_string(&mut text))
        .map_err(|error| format!("its meta.json cannot be read: {error}"))?;
    let meta: Meta = serde_json::from_str(&text)
        .map_err(|error| format!("its meta.json is damaged: {error}"))?;
    if meta.format != META_FORMAT {
        return Err(format!(
            "its meta.json has format {}; this Jiffy reads {META_FORMAT}",
            meta.format
        ));
    }
    let name = format!("{}-{}", meta.flavour, meta.hash);
    if !is_kernel_name(&name) || !(name == folder_name || meta.flavour.name() == folder_name) {
        return Err(format!("its meta.json is that of another kernel, {name:?}"));
    }
    let vmlinux = folder.join("vmlinux");
    let file =
        fs::metadata(&vmlinux).map_err(|error| format!("its vmlinux cannot be read: {error}"))?;
    if file.len() != meta.bytes {
        return Err(format!(
            "its vmlinux has {} bytes, not the {} it was built with",
            file.len(),
            meta.bytes
        ));
    }
    let built = file
        .modified()
        .ok()
        .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
        .map_or(0, |age| age.as_secs());
    Ok(Kernel {
        name,
        flavour: meta.flavour,
        hash: meta.hash,
        release: meta.release,
        source: meta.source,
        bytes: meta.bytes,
        built,
        origin,
        vmlinux,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a kernel of four bytes and its meta.json.
    fn put(folder: &Path, name: &str) {
        let (flavour, hash) = name.split_once('-').unwrap_or((name, "5eed"));
        put_as(folder, name, &meta(flavour, hash), b"1234");
    }

    fn put_as(folder: &Path, name: &str, meta: &str, image: &[u8]) {
        let folder = folder.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("meta.json"), meta).unwrap();
        fs::write(folder.join("vmlinux"), image).unwrap();
    }

    fn meta(flavour: &str, hash: &str) -> String {
        format!(
            r#"{{"format": 1, "flavour": "{flavour}", "hash": "{hash}", "release": "6.12.1-jiffy",
            "source": "linux-source-6.12 6.12.1-1", "compiler": "gcc 12", "bytes": 4, "more": true}}"#
        )
    }

    #[test]
    fn kernels_are_found_and_ordered() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["full-00ff", "base-00ff", "base-11ff"] {
            put(folder.path(), name);
        }
        let old = std::time::SystemTime::now() - std::time::Duration::from_secs(100);
        let image = File::options()
            .write(true)
            .open(folder.path().join("base-00ff/vmlinux"))
            .unwrap();
        image.set_modified(old).unwrap();
        for other in [
            ".build-x1",
            "source-0123",
            "base-",
            "base-xyz",
            "other-00ff",
        ] {
            fs::create_dir(folder.path().join(other)).unwrap();
        }
        let found = list(&[(Origin::Cache, folder.path())]).unwrap();
        let names: Vec<_> = found
            .kernels
            .iter()
            .map(|kernel| kernel.name.as_str())
            .collect();
        assert_eq!(names, ["base-11ff", "base-00ff", "full-00ff"]);
        assert_eq!(found.broken, []);
        assert_eq!(found.newest(Flavour::Base).unwrap().name, "base-11ff");
        assert_eq!(found.newest(Flavour::Plain), None);
        assert_eq!(found.named("base-0").unwrap().release, "6.12.1-jiffy");
        assert_eq!(found.named("base"), None);
    }

    #[test]
    fn a_built_kernel_precedes_an_installed_one() {
        let cache = tempfile::tempdir().unwrap();
        let share = tempfile::tempdir().unwrap();
        put(cache.path(), "base-aa");
        put(share.path(), "base");
        let found = list(&[
            (Origin::Installed, share.path()),
            (Origin::Cache, cache.path()),
        ])
        .unwrap();
        assert_eq!(found.newest(Flavour::Base).unwrap().name, "base-aa");
        assert_eq!(found.named("base-5eed").unwrap().origin, Origin::Installed);
    }

    #[test]
    fn broken_kernels_are_listed_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        put_as(
            folder.path(),
            "base-01",
            &meta("base", "01"),
            b"short but wrong",
        );
        put_as(folder.path(), "base-02", "{", b"1234");
        put_as(
            folder.path(),
            "base-03",
            &meta("base", "03").replace("1,", "9,"),
            b"1234",
        );
        fs::create_dir(folder.path().join("base-04")).unwrap();
        put_as(folder.path(), "base-05", &meta("full", "05"), b"1234");
        let found = list(&[(Origin::Cache, folder.path())]).unwrap();
        assert_eq!(found.kernels, []);
        let problems: Vec<_> = found
            .broken
            .iter()
            .map(|broken| broken.problem.as_str())
            .collect();
        assert!(problems[0].contains("15 bytes, not the 4"), "{problems:?}");
        assert!(problems[1].contains("damaged"), "{problems:?}");
        assert!(problems[2].contains("format 9"), "{problems:?}");
        assert!(problems[3].contains("cannot be read"), "{problems:?}");
        assert!(problems[4].contains("another kernel"), "{problems:?}");
    }

    #[test]
    fn a_missing_folder_has_no_kernels() {
        let folder = tempfile::tempdir().unwrap();
        let found = list(&[(Origin::Cache, &folder.path().join("none"))]).unwrap();
        assert_eq!(found, Kernels::default());
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(list(&[(Origin::Cache, &file)]).is_err());
    }

    #[test]
    fn flavours_have_names() {
        for flavour in Flavour::ALL {
            assert_eq!(flavour.name().parse::<Flavour>().unwrap(), flavour);
        }
        let error = "fast".parse::<Flavour>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no kernel flavour 'fast'; choose base, full, plain or sched"
        );
    }
}
