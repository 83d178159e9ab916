//! Who may write to a folder.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Whether only this process's user could have created the contents of this folder: the user owns
/// it, others may not write to it, and it is not a link.
///
/// # Errors
///
/// If lstat(2) of the folder fails, such as with `NotFound`.
pub fn is_mine_alone(folder: &Path) -> io::Result<bool> {
    let facts = fs::symlink_metadata(folder)?;
    let mine = facts.uid() == rustix::process::geteuid().as_raw();
    Ok(facts.is_dir() && mine && facts.mode() & 0o022 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn writable_folders_links_and_files_are_not_mine_alone() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("folder");
        fs::create_dir(&folder).unwrap();
        for (mode, mine) in [(0o700, true), (0o755, true), (0o775, false), (0o702, false)] {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_mine_alone(&folder).unwrap(), mine, "{mode:o}");
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        let link = above.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert!(!is_mine_alone(&link).unwrap());
        let file = above.path().join("file");
        fs::write(&file, b"").unwrap();
        assert!(!is_mine_alone(&file).unwrap());
        let missing = is_mine_alone(&above.path().join("missing")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
