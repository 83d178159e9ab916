//! A disk that tests fill up; also used by the unit tests.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system; only root can mount it.
pub struct SmallDisk(pub PathBuf);

impl SmallDisk {
    /// A file system of this size in a new folder.
    pub fn mount(at: &Path, size: usize) -> SmallDisk {
        fs::create_dir(at).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(at)
            .status();
        assert!(mounted.unwrap().success(), "mounting a tmpfs needs root");
        SmallDisk(at.to_owned())
    }

    /// Fills the disk.
    pub fn fill(&self) {
        let mut file = fs::File::create(self.0.join("filler")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }

    /// Frees that space.
    pub fn make_room(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut command = Command::new("umount");
        let _ = command.arg("-l").arg(&self.0).status();
    }
}
