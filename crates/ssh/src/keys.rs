//! The keys of a user's SSH connections to VMs, in the folder `ssh` of the data folder.
//!
//! | file | contents |
//! |---|---|
//! | `id_ed25519`, `id_ed25519.pub` | the user's key pair, in OpenSSH's formats |
//! | `host-secret` | one line: `jiffy-ssh-host-secret 1`, 32 bytes in hexadecimal, 8 bytes of their BLAKE3 hash |
//!
//! All are created at the first use. A VM's host key is derived from the secret and the VM's id
//! (HKDF-SHA256, RFC 5869), so nothing is stored per VM: a VM keeps its key when it hibernates, a
//! clone has its own, and no boot waits for a key.

use jiffy_cli::failure::{Failure, Result};
use jiffy_sys::ownership::is_mine_alone;
use ring::hkdf;
use russh::keys::ssh_key::LineEnding;
use russh::keys::ssh_key::private::{Ed25519Keypair, KeypairData};
use russh::keys::{PrivateKey, PublicKey};
use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// First words of `host-secret`.
const MAGIC: &str = "jiffy-ssh-host-secret";
/// Version of `host-secret`.
const VERSION: &str = "1";
/// Salt of the derivation; other kinds of keys from this secret need another salt.
const SALT: &[u8] = b"jiffy ssh host key 1";
/// Longest key file that is read, in bytes.
const MAX_FILE: u64 = 64 * 1024;

/// The keys of a user.
pub struct Keys {
    folder: PathBuf,
}

impl Keys {
    /// The keys in `data`, Jiffy's data folder. Nothing is read or created yet.
    pub fn below(data: &Path) -> Keys {
        Keys {
            folder: data.join("ssh"),
        }
    }

    /// The file of the user's private key.
    pub fn identity(&self) -> PathBuf {
        self.folder.join("id_ed25519")
    }

    /// Host keys of VMs' own SSH servers, as ssh has learned them.
    pub fn known_hosts(&self) -> PathBuf {
        self.folder.join("known_hosts")
    }

    /// Creates the user's key pair, or what is missing of it. Returns its public key.
    ///
    /// # Errors
    ///
    /// If others can write to the folder of the keys, or a file in it can't be read, can't be
    /// written or is damaged.
    pub fn client(&self) -> Result<PublicKey> {
        let path = self.identity();
        let text = self.read_or_make(&path, || {
            let key = ed25519(random()?, "jiffy")?;
            let text = key.to_openssh(LineEnding::LF).map_err(unusable)?;
            Ok(text.to_string())
        })?;
        let key = PrivateKey::from_openssh(text).map_err(|_| damaged(&path, "a private key"))?;
        let public = key.public_key().clone();
        let public_path = path.with_extension("pub");
        let line = public.to_openssh().map_err(unusable)? + "\n";
        // It may be of a key that was removed: ssh offers the key in this file, not the private one.
        if read(&public_path).ok().as_ref() != Some(&line) {
            jiffy_sys::durable::replace(&public_path, line.as_bytes())
                .map_err(|error| cant_write(&public_path, error))?;
        }
        Ok(public)
    }

    /// The host key of the VM with this id.
    ///
    /// # Errors
    ///
    /// If others can write to the folder of the keys, or the file of the secret can't be read,
    /// can't be created or is damaged.
    pub fn host(&self, vm_id: &str) -> Result<PrivateKey> {
        let path = self.folder.join("host-secret");
        let text = self.read_or_make(&path, || Ok(secret_line(&random()?)))?;
        let secret = parse_secret(&text).ok_or_else(|| damaged(&path, "a secret"))?;
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, SALT);
        let mut seed = [0; 32];
        salt.extract(&secret)
            .expand(&[vm_id.as_bytes()], hkdf::HKDF_SHA256)
            .and_then(|key| key.fill(&mut seed))
            .map_err(|_| Failure::new("the VM's host key can't be derived"))?;
        ed25519(seed, vm_id)
    }

    /// Reads a private file, and creates it if it is missing. Processes that create it concurrently
    /// use the same one.
    fn read_or_make(&self, path: &Path, make: impl FnOnce() -> Result<String>) -> Result<String> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.folder)
            .map_err(|error| cant_write(&self.folder, error))?;
        // Another user could have put keys there.
        if !is_mine_alone(&self.folder).map_err(|error| cant_read(&self.folder, error))? {
            return Err(Failure::new(format!(
                "{} is not a folder that only you can write to",
                self.folder.display()
            ))
            .hint("remove it, or set JIFFY_DATA to another folder"));
        }
        match read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            read => return read.map_err(|error| cant_read(path, error)),
        }
        write_new(path, make()?.as_bytes()).map_err(|error| cant_write(path, error))?;
        read(path).map_err(|error| cant_read(path, error))
    }
}

/// A public key as a line of known_hosts for this name.
///
/// # Errors
///
/// If the key can't be encoded.
pub fn known_hosts_line(name: &str, key: &PublicKey) -> Result<String> {
    let public = PublicKey::from(key.key_data().clone());
    Ok(format!(
        "{name} {}\n",
        public.to_openssh().map_err(unusable)?
    ))
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

/// Writes a file with mode 0600 and gives it this name, unless the name exists.
fn write_new(path: &Path, contents: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(contents)?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(path) {
        Err(error) if error.error.kind() != ErrorKind::AlreadyExists => return Err(error.error),
        _ => {}
    }
    jiffy_sys::durable::sync_folder_of(path)
}

fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| Failure::new(format!("getrandom(2) failed: {error}")))?;
    Ok(bytes)
}

fn ed25519(seed: [u8; 32], comment: &str) -> Result<PrivateKey> {
    let pair = KeypairData::Ed25519(Ed25519Keypair::from_seed(&seed));
    PrivateKey::new(pair, comment).map_err(unusable)
}

fn secret_line(secret: &[u8; 32]) -> String {
    let digits: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{MAGIC} {VERSION} {digits} {}\n", check(secret))
}

/// The secret in a line of [`secret_line`]; `None` if it is damaged or of another version.
fn parse_secret(line: &str) -> Option<[u8; 32]> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [MAGIC, VERSION, digits, hash] = words[..] else {
        return None;
    };
    let secret = *blake3::Hash::from_hex(digits).ok()?.as_bytes();
    (check(&secret) == hash).then_some(secret)
}

fn check(secret: &[u8; 32]) -> String {
    blake3::hash(secret).to_hex()[..16].to_owned()
}

fn unusable(error: russh::keys::ssh_key::Error) -> Failure {
    Failure::new(format!("the key can't be used: {error}"))
}

fn damaged(path: &Path, what: &str) -> Failure {
    Failure::new(format!(
        "{} does not contain {what} that this jiffy can read",
        path.display()
    ))
    .hint("remove it; the next connection creates a new one")
}

fn cant_read(path: &Path, error: std::io::Error) -> Failure {
    Failure::io(format_args!("{} can't be read", path.display()), error)
}

fn cant_write(path: &Path, error: std::io::Error) -> Failure {
    Failure::io(format_args!("{} can't be written", path.display()), error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn text(key: &PrivateKey) -> String {
        key.public_key().to_openssh().unwrap()
    }

    #[test]
    fn a_vm_keeps_its_host_key_and_no_two_share_one() {
        let data = tempfile::tempdir().unwrap();
        let first = text(&Keys::below(data.path()).host("0123456789ab").unwrap());
        let again = text(&Keys::below(data.path()).host("0123456789ab").unwrap());
        let other = text(&Keys::below(data.path()).host("0123456789ac").unwrap());
        assert_eq!(first, again);
        assert_ne!(first, other);
        let elsewhere = tempfile::tempdir().unwrap();
        let foreign = text(&Keys::below(elsewhere.path()).host("0123456789ab").unwrap());
        assert_ne!(first, foreign);
    }

    #[test]
    fn key_files_are_private_and_no_temporary_file_is_left() {
        let data = tempfile::tempdir().unwrap();
        let keys = Keys::below(data.path());
        let made = keys.client().unwrap();
        assert_eq!(keys.client().unwrap(), made);
        keys.host("0123456789ab").unwrap();
        let mut names = Vec::new();
        for entry in fs::read_dir(data.path().join("ssh")).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(
                mode & 0o077 == 0,
                name != "id_ed25519.pub",
                "{name} {mode:o}"
            );
            names.push(name);
        }
        names.sort();
        assert_eq!(names, ["host-secret", "id_ed25519", "id_ed25519.pub"]);
        let folder = fs::metadata(data.path().join("ssh")).unwrap();
        assert_eq!(folder.permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_new_key_replaces_the_public_key_of_a_removed_one() {
        let data = tempfile::tempdir().unwrap();
        let keys = Keys::below(data.path());
        let old = keys.client().unwrap();
        fs::remove_file(keys.identity()).unwrap();
        let new = keys.client().unwrap();
        assert_ne!(new, old);
        let file = fs::read_to_string(data.path().join("ssh/id_ed25519.pub")).unwrap();
        assert_eq!(file, new.to_openssh().unwrap() + "\n");
    }

    #[test]
    fn concurrent_key_creation_gives_one_key() {
        let data = tempfile::tempdir().unwrap();
        let made: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| Keys::below(data.path()).client().unwrap()))
                .collect();
            threads.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(made.iter().all(|key| *key == made[0]));
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        let data = tempfile::tempdir().unwrap();
        let keys = Keys::below(data.path());
        keys.client().unwrap();
        let folder = data.path().join("ssh");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        for failure in [
            keys.client().map(|_| ()).unwrap_err(),
            keys.host("0123456789ab").map(|_| ()).unwrap_err(),
        ] {
            assert!(failure.message.contains("only you"), "{failure}");
        }
    }

    #[test]
    fn a_damaged_file_is_named() {
        let data = tempfile::tempdir().unwrap();
        let keys = Keys::below(data.path());
        keys.client().unwrap();
        keys.host("0123456789ab").unwrap();
        let secret = data.path().join("ssh/host-secret");
        let good = fs::read_to_string(&secret).unwrap();
        for bad in [
            String::new(),
            good.replacen(" 1 ", " 2 ", 1),
            good.replacen(
                &good[25..26],
                if &good[25..26] == "0" { "1" } else { "0" },
                1,
            ),
            good[..good.len() / 2].to_owned(),
        ] {
            fs::write(&secret, &bad).unwrap();
            let failure = keys.host("0123456789ab").unwrap_err();
            assert!(failure.message.contains("host-secret"), "{failure}");
        }
        fs::write(keys.identity(), "nonsense").unwrap();
        let failure = keys.client().unwrap_err();
        assert!(failure.message.contains("id_ed25519"), "{failure}");
    }

    #[test]
    fn version_1_secret_format_and_derivation_are_unchanged() {
        let line = "jiffy-ssh-host-secret 1 \
                    000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
        let secret: [u8; 32] = std::array::from_fn(|index| index as u8);
        let whole = secret_line(&secret);
        assert!(whole.starts_with(line), "{whole}");
        assert_eq!(parse_secret(&whole), Some(secret));
        let data = tempfile::tempdir().unwrap();
        fs::create_dir(data.path().join("ssh")).unwrap();
        fs::write(data.path().join("ssh/host-secret"), whole).unwrap();
        let key = Keys::below(data.path()).host("0123456789ab").unwrap();
        let known = known_hosts_line("web.jiffy", key.public_key()).unwrap();
        // Python's hmac and openssl derive the same.
        let wanted = "AAAAC3NzaC1lZDI1NTE5AAAAIJnfS0UBNVmB6Q2eaB6bsA3/RpaBTKcJugkvLYCFpYRB";
        assert_eq!(known, format!("web.jiffy ssh-ed25519 {wanted}\n"));
    }
}
