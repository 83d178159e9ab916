//! Kernels: those that came with Jiffy, and the user's own.

use crate::digests::Digests;
use crate::error::{Error, Result};
use crate::names;
use crate::paths::Paths;
use jiffy_kernel::image::{Format, Image, ImageError};
use jiffy_wire::api::KernelInfo;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest kernel image, in bytes.
const MAX_KERNEL: u64 = 512 << 20;
const FILE: &str = "vmlinux";

/// The kernels of a node.
#[derive(Debug)]
pub struct Kernels {
    own: PathBuf,
    share: PathBuf,
    digests: Arc<Digests>,
}

impl Kernels {
    /// The kernels in these folders; the user's come first.
    pub fn new(paths: &Paths, digests: Arc<Digests>) -> Kernels {
        Kernels {
            own: paths.kernels(),
            share: paths.share.join("kernels"),
            digests,
        }
    }

    /// The file of a kernel.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        names::check("kernel", name)?;
        for folder in [&self.own, &self.share] {
            let path = folder.join(name).join(FILE);
            if path.exists() {
                return Ok(path);
            }
        }
        Err(Error::not_found(format!("There is no kernel {name}."))
            .hint("`jiffy kernel list` lists the kernels; `jiffy kernel build` makes them."))
    }

    /// All kernels, by name. Reads files that are new or changed: blocking.
    pub fn list(&self) -> Result<Vec<KernelInfo>> {
        let mut kernels: Vec<KernelInfo> = Vec::new();
        for folder in [&self.own, &self.share] {
            let Ok(entries) = fs::read_dir(folder) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let path = entry.path().join(FILE);
                let known = kernels.iter().any(|kernel| kernel.name == name);
                if known || names::check("kernel", &name).is_err() || !path.exists() {
                    continue;
                }
                kernels.push(self.info(name, &path)?);
            }
        }
        kernels.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(kernels)
    }

    /// Keeps a kernel under this name, in place of the user's own of that
    /// name. Blocking.
    pub fn put(&self, name: &str, contents: impl Read) -> Result<KernelInfo> {
        names::check("kernel", name)?;
        let folder = self.own.join(name);
        let failed = |error: io::Error| Error::io("keep a kernel", &folder, &error);
        self.write(&folder, contents, &failed)?;
        self.info(name.to_owned(), &folder.join(FILE))
    }

    /// Removes folders with nothing in them, which a daemon that ended in the middle
    /// leaves. [`Kernels::put`] removes none: another call may just put its kernel there.
    pub fn sweep(&self) {
        for entry in fs::read_dir(&self.own).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(entry.path());
        }
    }

    fn write(
        &self,
        folder: &Path,
        contents: impl Read,
        failed: &impl Fn(io::Error) -> Error,
    ) -> Result<()> {
        // Where the next daemon removes what has a dot.
        let mut temporary = tempfile::Builder::new()
            .prefix(".new-")
            .tempfile_in(&self.own)
            .map_err(failed)?;
        let size =
            io::copy(&mut contents.take(MAX_KERNEL + 1), &mut temporary).map_err(|error| {
                match error.kind() {
                    io::ErrorKind::ConnectionAborted => {
                        Error::invalid("The kernel ended early: the client went away.")
                    }
                    _ => failed(error),
                }
            })?;
        if size > MAX_KERNEL {
            return Err(Error::invalid(format!(
                "The kernel is larger than {} MiB.",
                MAX_KERNEL >> 20
            )));
        }
        check(temporary.path())?;
        temporary.as_file().sync_all().map_err(failed)?;
        fs::create_dir_all(folder).map_err(failed)?;
        let to = folder.join(FILE);
        temporary
            .persist(&to)
            .map_err(|error| failed(error.error))?;
        jiffy_sys::durable::sync_folder_of(&to).map_err(failed)
    }

    fn info(&self, name: String, path: &Path) -> Result<KernelInfo> {
        let failed = |error: io::Error| Error::io("read a kernel", path, &error);
        let data = fs::metadata(path).map_err(failed)?;
        let digest = self.digests.of(path).map_err(failed)?;
        Ok(KernelInfo {
            name,
            size: data.len(),
            digest,
        })
    }
}

/// Is the file a kernel that can be booted?
fn check(path: &Path) -> Result<()> {
    let problem = match Image::open(path) {
        Ok(Image {
            format: Format::Elf { pvh_entry: None },
            ..
        }) => "it is an ELF kernel without a PVH note".to_owned(),
        Ok(_) => return Ok(()),
        Err(ImageError::Malformed { problem, .. }) => problem.to_string(),
        Err(ImageError::Unknown { .. }) => "it is neither ELF nor a bzImage".to_owned(),
        Err(error) => {
            return Err(Error::internal(format!(
                "The kernel can't be checked: {error}."
            )));
        }
    };
    Err(
        Error::invalid(format!("This is no kernel that Jiffy can boot: {problem}."))
            .hint("Give an ELF kernel with a PVH note (vmlinux, CONFIG_PVH=y), or a bzImage."),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use jiffy_wire::api::ErrorKind;

    /// Looks around when it is read.
    struct Spy<'a>(&'a Path, Vec<String>);

    impl Read for Spy<'_> {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            let entries = fs::read_dir(self.0)?.flatten();
            let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            self.1.extend(names);
            Ok(0)
        }
    }

    #[test]
    fn what_is_half_here_lies_where_the_next_daemon_sweeps() {
        let folder = tempfile::tempdir().unwrap();
        let kernels = Kernels {
            own: folder.path().to_owned(),
            share: folder.path().join("share"),
            digests: Arc::default(),
        };
        let mut spy = Spy(folder.path(), Vec::new());
        let refused: Error = kernels.put("mine", &mut spy).unwrap_err();
        assert_eq!(refused.0.kind, ErrorKind::Invalid);
        assert_eq!(spy.1.len(), 1, "{:?}", spy.1);
        assert!(spy.1[0].starts_with(".new-"), "{:?}", spy.1);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        // One that is there stays.
        let known = folder.path().join("mine").join(FILE);
        fs::create_dir(known.parent().unwrap()).unwrap();
        fs::write(&known, "a kernel").unwrap();
        kernels.put("mine", &b"none"[..]).unwrap_err();
        assert!(known.exists());
        // Nor does the folder go that another upload has made for the same name.
        let other = folder.path().join("other");
        fs::create_dir(&other).unwrap();
        kernels.put("other", &b"none"[..]).unwrap_err();
        assert!(other.exists());
        kernels.sweep();
        assert!(known.exists() && !other.exists());
    }
}
