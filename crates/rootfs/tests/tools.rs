//! Imports of archives made by GNU tar, umoci and skopeo, and of folders with special files.

mod common;

use common::{Compression, Tar, compress, extract};
use jiffy_rootfs::{Choice, Imported, Limits, Source, SourceKind, import};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?} (see scripts/setup): {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn imported(path: &Path, out: &Path) -> Imported {
    let choice = Choice::new(out.parent().unwrap());
    let source = Source::open(path, &choice).unwrap();
    import(source, out, &Limits::default(), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap_or_else(|error| panic!("{}", common::sentence(&error)))
}

/// A folder with every kind of file that a test may create.
fn awkward_folder(root: &Path) {
    fs::create_dir_all(root.join("etc/deep")).unwrap();
    fs::write(root.join("etc/hosts"), "127.0.0.1 localhost\n").unwrap();
    fs::hard_link(root.join("etc/hosts"), root.join("etc/deep/hosts")).unwrap();
    symlink("/etc/hosts", root.join("absolute")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    fs::write(root.join(OsStr::from_bytes(b"not-\xff-utf8")), "x").unwrap();
    fs::write(root.join("n".repeat(255)), "long").unwrap();
    let deep = "d".repeat(200) + "/" + &"e".repeat(200);
    fs::create_dir_all(root.join(&deep)).unwrap();
    fs::write(root.join(&deep).join("f"), "deep").unwrap();
    run(Command::new("mkfifo").arg(root.join("pipe")));
    holey(&root.join("holes"), 40 << 20);
    let attribute = rustix::fs::setxattr(
        root.join("etc/hosts"),
        "user.note",
        b"kept",
        rustix::fs::XattrFlags::empty(),
    );
    // Older versions of tmpfs have no user attributes.
    assert!(matches!(
        attribute,
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP)
    ));
}

/// Writes data at the beginning, in the middle and at the end; the rest is holes.
fn holey(path: &Path, size: u64) {
    let file = File::create(path).unwrap();
    file.set_len(size).unwrap();
    file.write_all_at(b"begin", 0).unwrap();
    file.write_all_at(&[7; 10_000], size / 2 + 123).unwrap();
    file.write_all_at(b"end", size - 3).unwrap();
}

fn is_holey(path: &Path, size: u64) {
    let mut file = File::open(path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), size);
    let mut read = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        file.seek(SeekFrom::Start(at)).unwrap();
        file.read_exact(&mut bytes).unwrap();
        bytes
    };
    assert_eq!(read(0, 8), b"begin\0\0\0");
    let middle = read(size / 2, 10_300);
    assert!(middle[..123].iter().all(|byte| *byte == 0));
    assert!(middle[123..10_123].iter().all(|byte| *byte == 7));
    assert!(middle[10_123..].iter().all(|byte| *byte == 0));
    assert_eq!(read(size - 5, 5), b"\0\0end");
}

fn same_folders(one: &Path, other: &Path) {
    run(Command::new("diff")
        .args(["-r", "--no-dereference"])
        .arg(one)
        .arg(other));
}

#[test]
fn every_format_of_gnu_tar_gives_the_folder_s_image() {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("root");
    fs::create_dir(&root).unwrap();
    awkward_folder(&root);
    let folder = imported(&root, &scratch.path().join("folder.erofs"));
    assert!(folder.size < 2 << 20, "holes take no room: {}", folder.size);
    for options in [
        vec!["--format=gnu", "-S"],
        vec!["--format=pax", "-S", "--sparse-version=0.0"],
        vec!["--format=pax", "-S", "--sparse-version=0.1"],
        vec!["--format=pax", "-S", "--sparse-version=1.0"],
    ] {
        let archive = scratch.path().join("root.tar");
        let mut tar = Command::new("tar");
        tar.args(&options)
            .args(["--numeric-owner", "-cf"])
            .arg(&archive);
        if options[0] == "--format=pax" {
            tar.args(["--xattrs", "--xattrs-include=user.*"]);
        }
        run(tar.arg("-C").arg(&root).arg("."));
        let image = scratch.path().join("tar.erofs");
        let found = imported(&archive, &image);
        if options[0] == "--format=pax" {
            assert_eq!(found.digest, folder.digest, "{options:?}");
        }
        assert!(found.size < 2 << 20, "{options:?}: {}", found.size);
    }
    // fsck.erofs 1.5 leaves holes out when it unpacks. The test that mounts the image covers them.
    let unpacked = extract(&scratch.path().join("folder.erofs"));
    fs::remove_file(root.join("holes")).unwrap();
    fs::remove_file(unpacked.root.join("holes")).unwrap();
    // diff would block on pipes.
    fs::remove_file(root.join("pipe")).unwrap();
    fs::remove_file(unpacked.root.join("pipe")).unwrap();
    same_folders(&root, &unpacked.root);
}

#[test]
fn a_file_of_more_than_8_gib_is_described() {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("root");
    fs::create_dir(&root).unwrap();
    let size = 9 << 30;
    holey(&root.join("huge"), size);
    let image = scratch.path().join("image");
    let folder = imported(&root, &image);
    assert!(folder.size < 2 << 20, "{} bytes", folder.size);
    let archive = scratch.path().join("tar");
    run(Command::new("tar")
        .args(["-S", "--format=gnu", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(&root)
        .arg("."));
    assert_eq!(imported(&archive, &image).digest, folder.digest);
    let dump = Command::new("dump.erofs")
        .arg("--path=/huge")
        .arg(&image)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&dump.stdout).into_owned();
    assert!(text.contains(&format!("Size: {size}")), "{text}");
}

#[test]
fn an_import_does_not_leave_its_folder() {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(scratch.path().join("secret"), "secret").unwrap();
    symlink(scratch.path(), root.join("out")).unwrap();
    symlink("../secret", root.join("file")).unwrap();
    let image = scratch.path().join("image");
    imported(&root, &image);
    let unpacked = extract(&image);
    assert!(
        fs::symlink_metadata(unpacked.root.join("out"))
            .unwrap()
            .is_symlink()
    );
    assert!(
        fs::symlink_metadata(unpacked.root.join("file"))
            .unwrap()
            .is_symlink()
    );
}

#[test]
fn virtual_file_systems_are_not_imported() {
    let scratch = tempfile::tempdir().unwrap();
    let source = Source::open(Path::new("/proc"), &Choice::new(scratch.path())).unwrap();
    let out = scratch.path().join("image");
    let error = import(source, &out, &Limits::default(), &mut |_| {
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("mounted kernel file system"), "{error}");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

fn umoci(folder: &Path, arguments: &[&str]) {
    let mut command = Command::new("umoci");
    run(command.current_dir(folder).args(arguments));
}

#[test]
fn an_image_from_umoci_imports_as_umoci_unpacks_it() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    umoci(scratch.path(), &["init", "--layout", "oci"]);
    umoci(scratch.path(), &["new", "--image", "oci:v1"]);
    let layer = |tar: Tar, options: &[&str]| {
        fs::write(at("layer.tar"), tar.bytes()).unwrap();
        let add = ["raw", "add-layer", "--image", "oci:v1", "layer.tar"];
        umoci(scratch.path(), &[&add[..], options].concat());
    };
    let hard = tar::EntryType::Link;
    layer(
        Tar::new()
            .folder("etc")
            .file("etc/a", b"1")
            .file("etc/b", &[2; 100_000])
            .file("usr/bin/x", &[3; 5000])
            .link(tar::EntryType::Symlink, "bin", "usr/bin")
            .folder("var")
            .file("var/old", b"gone"),
        &[],
    );
    layer(
        Tar::new()
            .file("etc/.wh.a", b"")
            .link(hard, "etc/c", "etc/b")
            .folder("var")
            .file("var/.wh..wh..opq", b"")
            .file("var/new", b"here"),
        &[],
    );
    layer(Tar::new().folder("etc").file("etc/b", b"small"), &[]);
    umoci(
        scratch.path(),
        &[
            "config",
            "--image",
            "oci:v1",
            "--config.cmd",
            "sh",
            "--config.env",
            "A=b",
            "--config.exposedports",
            "80/tcp",
            "--config.workingdir",
            "/srv",
        ],
    );
    umoci(
        scratch.path(),
        &["unpack", "--rootless", "--image", "oci:v1", "bundle"],
    );

    let image = at("image.erofs");
    let mut choice = Choice::new(scratch.path());
    choice.reference = Some("v1".into());
    let source = Source::open(&at("oci"), &choice).unwrap();
    assert_eq!(source.kind(), SourceKind::Oci);
    let found = import(source, &image, &Limits::default(), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(found.config.cmd, ["sh"]);
    assert!(found.config.env.contains(&"A=b".into()));
    assert_eq!(found.config.working_dir, "/srv");
    assert_eq!(found.config.exposed_ports.first().unwrap().port, 80);
    let unpacked = extract(&image);
    same_folders(&at("bundle/rootfs"), &unpacked.root);
    let links = |name: &str| fs::metadata(unpacked.root.join(name)).unwrap().nlink();
    assert!(links("etc/c") >= 1);

    // The same image as skopeo writes it in other formats.
    for (target, kind) in [
        ("oci-archive:copy.oci.tar:v1", SourceKind::Oci),
        (
            "docker-archive:copy.docker.tar:example/v:1",
            SourceKind::DockerArchive,
        ),
    ] {
        let mut copy = Command::new("skopeo");
        copy.current_dir(scratch.path());
        run(copy.args(["--insecure-policy", "copy", "oci:oci:v1", target]));
        let file = at(target.split(':').nth(1).unwrap());
        for how in [Compression::Plain, Compression::Gzip] {
            let compressed = compress(&fs::read(&file).unwrap(), how);
            File::create(&file).unwrap().write_all(&compressed).unwrap();
            let source = Source::open(&file, &Choice::new(scratch.path())).unwrap();
            assert_eq!(source.kind(), kind);
            let copy = imported(&file, &at("copy.erofs"));
            assert_eq!(copy.digest, found.digest);
            assert_eq!(copy.config.cmd, ["sh"]);
        }
    }
}

#[test]
fn the_kernel_mounts_what_is_written() {
    // Without root or without EROFS in the kernel, only the tests with fsck.erofs cover the image.
    let systems = fs::read_to_string("/proc/filesystems").unwrap();
    if !rustix::process::geteuid().is_root() || !systems.contains("\terofs") {
        eprintln!("not mounted: this requires root and a kernel with EROFS");
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("root");
    fs::create_dir(&root).unwrap();
    awkward_folder(&root);
    let image = scratch.path().join("image");
    imported(&root, &image);
    let at = scratch.path().join("mounted");
    fs::create_dir(&at).unwrap();
    run(Command::new("mount")
        .args(["-t", "erofs", "-o", "loop,ro"])
        .arg(&image)
        .arg(&at));
    let checked = std::panic::catch_unwind(|| {
        is_holey(&at.join("holes"), 40 << 20);
        fs::remove_file(root.join("pipe")).unwrap();
        let mut diff = Command::new("diff");
        let output = diff
            .args(["-r", "--no-dereference"])
            .arg(&root)
            .arg(&at)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.lines().all(|line| line.contains("pipe")), "{text}");
    });
    run(Command::new("umount").arg(&at));
    checked.unwrap();
}
