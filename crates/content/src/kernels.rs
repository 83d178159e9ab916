//! Kernels: those that came with Jiffy, and the user's own.

use crate::digests::Digests;
use crate::durable::{self, is_taken};
use crate::error::{Error, Result};
use crate::names;
use crate::paths::Paths;
use jiffy_kernel::image::{Format, Image, ImageError};
use jiffy_sys::durable::remove_any;
use jiffy_wire::api::KernelInfo;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::info;

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
    ///
    /// # Errors
    ///
    /// If the name is not valid, there is no such kernel, or its file is missing or empty.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        names::check("kernel", name)?;
        for folder in [&self.own, &self.share] {
            let folder = folder.join(name);
            let path = folder.join(FILE);
            match durable::check_not_empty(&path) {
                Ok(()) => return Ok(path),
                // Never falls back to another kernel of the same name.
                Err(why) if is_taken(&folder) => return Err(unusable(name, &why)),
                Err(_) => {}
            }
        }
        Err(Error::not_found(format!("There is no kernel {name}."))
            .hint("`jiffy kernel list` lists the kernels; `jiffy kernel build` makes them."))
    }

    /// All kernels, by name. Reads files that are new or changed: blocking.
    pub fn list(&self) -> Vec<KernelInfo> {
        let kernels = self.files().into_iter().map(|(name, path)| {
            let info = path.and_then(|path| self.info(name.clone(), &path));
            info.unwrap_or_else(|error| KernelInfo {
                name,
                error: Some(error.0.message),
                ..KernelInfo::default()
            })
        });
        kernels.collect()
    }

    /// The file of each kernel, by its name, or why it can't be used.
    pub fn files(&self) -> BTreeMap<String, Result<PathBuf>> {
        let mut found = BTreeMap::new();
        for folder in [&self.own, &self.share] {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if names::check("kernel", &name).is_ok() && !found.contains_key(&name) {
                    let file = self.find(&name);
                    found.insert(name, file);
                }
            }
        }
        found
    }

    /// Keeps a kernel under this name, in place of the user's own of that
    /// name. Blocking.
    ///
    /// # Errors
    ///
    /// If the name is not valid, `contents` are incomplete, over 512 MiB or no kernel that boots
    /// here, or the file can't be written.
    pub fn put(&self, name: &str, contents: impl Read) -> Result<KernelInfo> {
        names::check("kernel", name)?;
        let folder = self.own.join(name);
        let failed = |error: io::Error| Error::io("store a kernel", &folder, &error);
        self.write(&folder, contents, &failed)?;
        self.info(name.to_owned(), &folder.join(FILE))
    }

    /// Removes empty folders that a killed daemon has left. [`Kernels::put`] removes none, because
    /// a concurrent call may be about to put its kernel there.
    pub fn sweep(&self) {
        for entry in fs::read_dir(&self.own).into_iter().flatten().flatten() {
            let path = entry.path();
            if fs::remove_dir(&path).is_ok() {
                info!(path = %path.display(), "removing an empty folder of a kernel");
            }
        }
    }

    fn write(
        &self,
        folder: &Path,
        contents: impl Read,
        failed: &impl Fn(io::Error) -> Error,
    ) -> Result<()> {
        // The next daemon removes names that begin with a dot from this folder.
        let mut temporary = tempfile::Builder::new()
            .prefix(".new-")
            .tempfile_in(&self.own)
            .map_err(failed)?;
        let size =
            io::copy(&mut contents.take(MAX_KERNEL + 1), &mut temporary).map_err(|error| {
                match error.kind() {
                    io::ErrorKind::ConnectionAborted => {
                        Error::invalid("The kernel is incomplete: the client disconnected.")
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
        let to = folder.join(FILE);
        remove_obstacles(folder, &to).map_err(failed)?;
        fs::create_dir_all(folder).map_err(failed)?;
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
            error: None,
        })
    }
}

/// Removes anything that blocks the kernel's path: a file in place of its folder, or a folder in
/// place of its file.
fn remove_obstacles(folder: &Path, file: &Path) -> io::Result<()> {
    if fs::metadata(folder).is_ok_and(|data| !data.is_dir()) || !folder.exists() {
        remove_any(folder)?;
    }
    match fs::symlink_metadata(file) {
        Ok(data) if data.is_dir() => fs::remove_dir_all(file),
        _ => Ok(()),
    }
}

fn unusable(name: &str, why: &str) -> Error {
    Error::internal(format!("The kernel {name} can't be used: {why}."))
        .hint("Give the file to --kernel again, or remove it from the node's data folder.")
}

/// Checks that the file is a kernel that can be booted.
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
        Error::invalid(format!("Jiffy can't boot this kernel: {problem}."))
            .hint("Give an ELF kernel with a PVH note (vmlinux, CONFIG_PVH=y), or a bzImage."),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use jiffy_wire::api::ErrorKind;

    /// A reader that lists the folder each time it is read.
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
    fn an_unfinished_kernel_is_left_where_the_next_sweep_removes_it() {
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
        // An existing kernel is kept.
        let known = folder.path().join("mine").join(FILE);
        fs::create_dir(known.parent().unwrap()).unwrap();
        fs::write(&known, "a kernel").unwrap();
        kernels.put("mine", &b"none"[..]).unwrap_err();
        assert!(known.exists());
        // A folder made by a concurrent upload of the same name is kept.
        let other = folder.path().join("other");
        fs::create_dir(&other).unwrap();
        kernels.put("other", &b"none"[..]).unwrap_err();
        assert!(other.exists());
        kernels.sweep();
        assert!(known.exists() && !other.exists());
    }
}
