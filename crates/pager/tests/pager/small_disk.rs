//! A disk that tests fill up; those of the crate itself use it, too.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of its own, which is root's to mount.
pub struct SmallDisk(pub PathBuf);

impl SmallDisk {
    /// Of so many bytes, in a new folder.
    pub fn mount(at: &Path, size: usize) -> SmallDisk {
        fs::create_dir(at).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(at)
            .status();
        assert!(mounted.unwrap().success(), "mounting a tmpfs needs root");
        SmallDisk(at.to_owned())
    }

    /// Takes all room that is left.
    pub fn fill(&self) {
        let mut file = fs::File::create(self.0.join("filler")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }

    /// Gives it back.
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
