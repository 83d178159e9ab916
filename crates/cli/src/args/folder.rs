//! Folders of the host that a VM or the machine shares: `-v`, `--mount` and `--share`.

use jiffy_wire::api::FolderUse;
use std::path::{PathBuf, absolute};

/// A folder of `jiffy machine start --share`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineShare {
    /// `none`: share nothing.
    None,
    /// `DIR` or `DIR:ro`.
    Folder {
        /// Its path, as given.
        path: PathBuf,
        /// Whether the machine may only read it.
        read_only: bool,
    },
}

/// Parses `DIR`, `DIR:ro`, `DIR:rw` or `none`.
///
/// # Errors
///
/// If it names no folder. The error is a sentence, as clap wants it.
pub fn machine_share(text: &str) -> Result<MachineShare, String> {
    if text == "none" {
        return Ok(MachineShare::None);
    }
    let (path, read_only) = match text.rsplit_once(':') {
        Some((path, "ro")) => (path, true),
        Some((path, "rw")) => (path, false),
        _ => (text, false),
    };
    if path.is_empty() {
        return Err(format!(
            "'{text}' names no folder; write DIR, DIR:ro or none"
        ));
    }
    Ok(MachineShare::Folder {
        path: path.into(),
        read_only,
    })
}

/// How a folder is shared.
#[derive(Debug, Clone, Copy, Default)]
struct How {
    read_only: bool,
    capture: bool,
}

/// Parses `HOST:GUEST` and `HOST:GUEST:OPTIONS`, of which there are `ro`, `rw` and `capture`.
///
/// # Errors
///
/// If a part is missing or is no option, the source is not a path, or the mount point is not
/// absolute. The error is a sentence.
pub fn folder_use(text: &str) -> Result<FolderUse, String> {
    const USAGE: &str = "write HOST:GUEST or HOST:GUEST:OPTIONS, with the options ro and capture";
    let mut parts = text.split(':');
    let (Some(source), Some(mount)) = (parts.next(), parts.next()) else {
        return Err(format!("'{text}' names no folder in the VM; {USAGE}"));
    };
    let wrong = || format!("'{text}' is not a shared folder; {USAGE}");
    let options = parts.next();
    if parts.next().is_some() {
        return Err(wrong());
    }
    let mut how = How::default();
    for option in options.into_iter().flat_map(|options| options.split(',')) {
        match option {
            "ro" => how.read_only = true,
            "rw" => how.read_only = false,
            "capture" => how.capture = true,
            _ => return Err(wrong()),
        }
    }
    shared(source, mount, how)
}

/// Parses `type=bind,source=HOST,target=GUEST[,readonly][,capture]`, as Docker does.
///
/// # Errors
///
/// If it lacks a path or has an unknown option, the source is not a path, or the target is not
/// absolute. The error is a sentence.
pub fn mount(text: &str) -> Result<FolderUse, String> {
    let (mut source, mut target, mut how) = (None, None, How::default());
    for option in text.split(',') {
        match option.split_once('=').unwrap_or((option, "")) {
            ("type", "bind") => {}
            ("type", "volume") => {
                return Err("a volume is attached with --disk NAME,mount=PATH".to_owned());
            }
            ("source" | "src", path) => source = Some(path),
            ("target" | "dst" | "destination", path) => target = Some(path),
            ("readonly" | "ro", "" | "true" | "1") => how.read_only = true,
            ("readonly" | "ro", "false" | "0") => how.read_only = false,
            ("capture", "" | "true" | "1") => how.capture = true,
            ("capture", "false" | "0") => how.capture = false,
            _ => {
                return Err(format!(
                    "'{option}' is not an option of a mount; write type=bind,source=HOST,target=GUEST[,readonly][,capture]"
                ));
            }
        }
    }
    let (Some(source), Some(target)) = (source, target) else {
        return Err(format!(
            "'{text}' lacks source=HOST or target=GUEST of the folder"
        ));
    };
    shared(source, target, how)
}

fn shared(source: &str, mount: &str, how: How) -> Result<FolderUse, String> {
    let is_path = source.contains('/') || source == "." || source == "..";
    if !is_path {
        return Err(format!(
            "'{source}' is not a path of a folder: write ./{source}, or attach a volume with --disk {source},mount={mount}"
        ));
    }
    if !mount.starts_with('/') {
        return Err(format!(
            "'{mount}' is not an absolute path in the VM, such as /src"
        ));
    }
    let source = absolute(source)
        .map_err(|error| format!("the path of '{source}' can't be determined: {error}"))?;
    let source = source.into_os_string().into_string();
    Ok(FolderUse {
        source: source.map_err(|path| format!("{path:?} is not UTF-8"))?,
        mount: mount.to_owned(),
        read_only: how.read_only,
        capture: how.capture,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(source: &str, mount: &str, read_only: bool) -> FolderUse {
        FolderUse {
            source: source.into(),
            mount: mount.into(),
            read_only,
            capture: false,
        }
    }

    fn captured(source: &str, mount: &str, read_only: bool) -> FolderUse {
        FolderUse {
            capture: true,
            ..of(source, mount, read_only)
        }
    }

    #[test]
    fn a_folder_has_two_paths_and_may_be_read_only() {
        assert_eq!(folder_use("/a:/b").unwrap(), of("/a", "/b", false));
        assert_eq!(folder_use("/a:/b:rw").unwrap(), of("/a", "/b", false));
        assert_eq!(folder_use("/a/b:/b:ro").unwrap(), of("/a/b", "/b", true));
        let here = std::env::current_dir().unwrap();
        let here = here.to_str().unwrap();
        assert_eq!(folder_use(".:/src").unwrap(), of(here, "/src", false));
        let below = format!("{here}/x");
        assert_eq!(folder_use("./x:/src").unwrap(), of(&below, "/src", false));
        let given = folder_use("/a:/b:capture").unwrap();
        assert_eq!(given, captured("/a", "/b", false));
        let given = folder_use("/a:/b:ro,capture").unwrap();
        assert_eq!(given, captured("/a", "/b", true));
        for wrong in [
            "",
            "/a",
            "/a:",
            "/a:b",
            "/a:/b:",
            "/a:/b:x",
            "/a:/b:ro,",
            "/a:/b:ro:ro",
        ] {
            assert!(folder_use(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_machine_shares_a_folder_or_none() {
        let folder = |path: &str, read_only| MachineShare::Folder {
            path: path.into(),
            read_only,
        };
        assert_eq!(machine_share("none"), Ok(MachineShare::None));
        assert_eq!(machine_share("./none"), Ok(folder("./none", false)));
        assert_eq!(machine_share("/a:ro"), Ok(folder("/a", true)));
        assert_eq!(machine_share("/a:rw"), Ok(folder("/a", false)));
        assert_eq!(machine_share("/a:b"), Ok(folder("/a:b", false)));
        assert!(machine_share("").is_err());
        assert!(machine_share(":ro").is_err());
    }

    #[test]
    fn a_name_is_taken_for_a_volume() {
        let error = folder_use("data:/data").unwrap_err();
        assert!(error.contains("--disk data,mount=/data"), "{error}");
        let error = mount("type=volume,source=data,target=/data").unwrap_err();
        assert!(error.contains("--disk"), "{error}");
    }

    #[test]
    fn mounts_are_written_as_for_docker() {
        let given = mount("type=bind,source=/a,target=/b").unwrap();
        assert_eq!(given, of("/a", "/b", false));
        let given = mount("readonly,src=/a,type=bind,dst=/b").unwrap();
        assert_eq!(given, of("/a", "/b", true));
        let given = mount("src=/a,capture,type=bind,dst=/b").unwrap();
        assert_eq!(given, captured("/a", "/b", false));
        let given = mount("src=/a,destination=/b,readonly=false").unwrap();
        assert_eq!(given, of("/a", "/b", false));
        for wrong in [
            "",
            "type=bind",
            "type=tmpfs,source=/a,target=/b",
            "source=/a",
            "target=/b",
            "source=/a,target=/b,mode=1",
        ] {
            assert!(mount(wrong).is_err(), "{wrong}");
        }
    }
}
