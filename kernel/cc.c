/*
 * The C compiler of kernel/build: gcc with precompiled kernel headers.
 *
 * Half of the time and more in which gcc compiles a typical file of the kernel goes
 * into reading the same headers again. This program stands in for gcc and lets it
 * read them precompiled (JIFFY_PCH names the folder); where that could change the
 * meaning of a file it runs gcc as it was called. kernel/build --verify compares the
 * result with that of plain gcc, byte by byte.
 *
 * The folder holds
 *   NAME.all.h         the headers that are precompiled under that name
 * and for each level of optimization
 *   LEVEL/NAME.h       what gcc reads when it refuses the precompiled header: an error
 *   LEVEL/NAME.h.gch   the precompiled header
 *   LEVEL/NAME.words   every identifier in it, each between two newlines
 *   LEVEL/NAME.seen/   an empty file for each header in it that guards itself
 * The last three are made here before the first objects that JIFFY_PCH_MAKE lists.
 *
 * gcc does not remember which headers a precompiled one holds: at each #include it would
 * read such a file again to find that its guard is defined, a megabyte and more for a
 * typical file. It finds the empty files first.
 *
 * A precompiled header is used only when
 * - it is an ordinary file of the 64-bit kernel, compiled with the common flags
 *   (gcc itself refuses the header when a flag that matters differs);
 * - no macro that the file defines before its last #include is mentioned in the
 *   headers that were read already;
 * - no function of theirs that the file uses prints with the file's prefix or names
 *   its module: those were precompiled with MARK, and an object that holds it is
 *   compiled again.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* The prefix and module name in precompiled headers, as kernel/build defines them. */
#define MARK "jiffy-precompiled"

/* Files that are compiled with plain gcc at once. */
static const char *const alone[] = {
    /* gcc would put their functions in another order: the same code, but not the same
     * bytes. */
    "kernel/seccomp.o", "fs/iomap/buffered-io.o", "io_uring/io_uring.o",
    /* Their objects hold MARK, or they do not compile: known, to save the attempt. */
    "kernel/printk/printk.o", "lib/lz4/lz4_decompress.o", "lib/sort.o", "mm/page_alloc.o",
    "mm/slub.o", "mm/vmalloc.o", "net/core/dev.o", "net/core/skbuff.o", "net/ipv4/ping.o",
    "net/packet/af_packet.o",
};

static char **called;

static void fail(const char *what, const char *which)
{
    fprintf(stderr, "kernel/cc: %s %s\n", what, which);
    exit(1);
}

static void plain(void)
{
    called[0] = "gcc";
    execvp("gcc", called);
    fail("cannot run", "gcc");
}

static char *text(const char *format, ...)
{
    va_list arguments;
    char *result;

    va_start(arguments, format);
    if (vasprintf(&result, format, arguments) < 0)
        fail("out of memory for", format);
    va_end(arguments);
    return result;
}

static int starts(const char *string, const char *with)
{
    return strncmp(string, with, strlen(with)) == 0;
}

static int ends(const char *string, const char *with)
{
    size_t length = strlen(string), tail = strlen(with);

    return length >= tail && strcmp(string + length - tail, with) == 0;
}

/* The whole file and a zero after it, or NULL. */
static char *read_file(const char *path, size_t *length)
{
    struct stat status;
    char *contents = NULL;
    int file = open(path, O_RDONLY | O_CLOEXEC);

    if (file < 0)
        return NULL;
    if (fstat(file, &status) == 0 && (contents = calloc(1, status.st_size + 1)) &&
        read(file, contents, status.st_size) == status.st_size) {
        *length = status.st_size;
    } else {
        free(contents);
        contents = NULL;
    }
    close(file);
    return contents;
}

static int is_marked(const char *object)
{
    size_t length;
    char *contents = read_file(object, &length);

    return !contents || memmem(contents, length, MARK, strlen(MARK));
}

static void write_file(const char *path, const char *contents)
{
    FILE *file = fopen(path, "we");

    if (!file || fputs(contents, file) < 0 || fclose(file) != 0)
        fail("cannot write", path);
}

static int run(char **arguments)
{
    int status;
    pid_t child = vfork();

    if (child == 0) {
        execvp(arguments[0], arguments);
        _exit(127);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        fail("cannot run", arguments[0]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* Whether the headers' meaning does not depend on what the file defines. */
static int harmless(const char *source, const char *words)
{
    size_t length;
    char *contents = read_file(source, &length), *line, *next;
    char *defined[256];
    int count = 0, until_include = 0;

    if (!contents)
        return 0;
    for (line = contents; line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        line += strspn(line, " \t");
        if (*line++ != '#')
            continue;
        line += strspn(line, " \t");
        if (starts(line, "include")) {
            until_include = count;
            continue;
        }
        if (starts(line, "define"))
            line += strlen("define");
        else if (starts(line, "undef"))
            line += strlen("undef");
        else
            continue;
        line += strspn(line, " \t");
        line[strspn(line, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789")] = '\0';
        /* A table at the end of a file may be longer; nothing is included after it. */
        if (count < 256)
            defined[count] = line;
        count++;
    }
    if (until_include > 256)
        return 0;
    for (int i = 0; i < until_include; i++) {
        /* The first two are marked; a header of trace events is read again, by
         * itself, for the file that creates them. */
        if (!strcmp(defined[i], "pr_fmt") || !strcmp(defined[i], "dev_fmt") ||
            !strcmp(defined[i], "CREATE_TRACE_POINTS"))
            continue;
        if (strstr(words, text("\n%s\n", defined[i])))
            return 0;
    }
    return 1;
}

/* Whether all of a header stands between "#ifndef NAME" and its "#endif", with a
 * "#define NAME" there: read once more, it is nothing. */
static int guarded(const char *header)
{
    size_t length;
    char *contents = read_file(header, &length), *c, *line, *next;
    char guard[100] = "", name[100], more;
    int depth = 0, defined = 0;

    if (!contents)
        return 0;
    for (c = contents; *c; c++) {
        char *end = NULL;

        if (c[0] == '/' && c[1] == '*')
            end = (end = strstr(c + 2, "*/")) ? end + 2 : contents + length;
        else if (c[0] == '/' && c[1] == '/')
            end = c + strcspn(c, "\n");
        else if (c[0] == '\\' && c[1] == '\n')
            end = c + 2;
        if (end) {
            memset(c, ' ', end - c);
            c = end - 1;
        }
    }
    for (line = contents; line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        line += strspn(line, " \t");
        if (*line == '\0')
            continue;
        /* Nothing comes before the guard, and nothing after it. */
        if (depth == 0 && (*guard || *line != '#'))
            return 0;
        if (*line++ != '#')
            continue;
        line += strspn(line, " \t");
        if (!*guard) {
            if (sscanf(line, "ifndef %99[A-Za-z0-9_] %c", guard, &more) != 1 &&
                sscanf(line, "if ! defined ( %99[A-Za-z0-9_] ) %c", guard, &more) != 1)
                return 0;
            depth = 1;
        } else if (starts(line, "if")) {
            depth++;
        } else if (starts(line, "endif")) {
            depth--;
        } else if (starts(line, "el") && depth == 1) {
            return 0;
        } else if (sscanf(line, "define %99[A-Za-z0-9_]", name) == 1 && !strcmp(name, guard)) {
            defined = 1;
        }
    }
    free(contents);
    return *guard && depth == 0 && defined;
}

/* Makes empty files of the names under which the file includes what was precompiled. */
static void hide(const char *seen, const char *depends, char **flags, int count)
{
    size_t length;
    char *header = read_file(depends, &length), *rest = NULL;
    const char *folders[64];
    int n = 0;

    if (!header)
        fail("cannot read", depends);
    for (int i = 0; i < count && n < 64; i++)
        if (starts(flags[i], "-I") && strstr(flags[i], "/include"))
            folders[n++] = flags[i] + strlen(starts(flags[i], "-I./") ? "-I./" : "-I");
    for (header = strtok_r(header, " \\\n", &rest); header; header = strtok_r(NULL, " \\\n", &rest)) {
        if (!ends(header, ".h") || strstr(header, "/../") || !guarded(header))
            continue;
        for (int i = 0; i < n; i++) {
            const char *name = header + strlen(folders[i]) + 1;
            char *path;
            int first = 0;

            if (!starts(header, folders[i]) || name[-1] != '/')
                continue;
            /* Another file of that name may come first. */
            while (access(text("%s/%s", folders[first], name), F_OK) != 0)
                first++;
            if (first != i)
                continue;
            path = text("%s/%s", seen, name);
            for (char *slash = path + strlen(seen); slash; slash = strchr(slash + 1, '/')) {
                *slash = '\0';
                mkdir(path, 0777);
                *slash = '/';
            }
            write_file(path, "");
        }
    }
}

/* Makes a precompiled header with the flags of an ordinary file, and its list of words. */
static void precompile(const char *path, const char *headers, char **flags, int count)
{
    char **command = calloc(count + 10, sizeof *command);
    char *depends = text("%s.d", path), *fresh = text("%s.new", path);
    int n = 0;

    command[n++] = "gcc";
    for (int i = 0; i < count; i++)
        /* Folders of headers, but not the file's own folder. */
        if (!starts(flags[i], "-I") || strstr(flags[i], "/include"))
            command[n++] = flags[i];
    char *rest[] = { "-MD", "-MF", depends, "-x", "c-header", "-o", fresh, (char *)headers };
    for (int i = 0; i < 8; i++)
        command[n++] = rest[i];
    if (run(command) != 0 || rename(fresh, text("%s.h.gch", path)) != 0)
        fail("cannot precompile", headers);
    hide(text("%s.seen", path), depends, flags, count);
    /* The prerequisites of a rule: the words after its colon, without backslashes. */
    char *words[] = { "sh", "-c",
        "tr -s ' \\\\\\n' '\\n' <\"$0\" | grep '\\.h$' | xargs cat | "
        "LC_ALL=C tr -cs A-Za-z0-9_ '\\n' | awk 'BEGIN { print \"\" } !seen[$0]++' >\"$1\"",
        depends, text("%s.words", path), NULL };
    if (run(words) != 0)
        fail("cannot list the words of", headers);
}

/* A call of kbuild that compiles an ordinary file. */
struct call {
    const char *source, *object, *depends, *level;
    /* What is passed on, with room for what is added. */
    char **flags;
    int count;
    /* The names of the file's module, as lines of C. */
    char defines[4096];
};

/* Records one of these names: a precompiled header redefines it, so -D has no effect. */
static void note_name(struct call *call, const char *argument)
{
    size_t used = strlen(call->defines);
    int name = strcspn(argument, "=") - 2;

    if (used < sizeof call->defines - 1)
        snprintf(call->defines + used, sizeof call->defines - used,
                 "#undef %.*s\n#define %.*s %s\n", name, argument + 2, name, argument + 2,
                 argument + 2 + name + 1);
}

/* Whether the call compiles an ordinary file, for which precompiled headers fit. */
static int understood(struct call *call, int count, char **arguments)
{
    int names = 0, compiles = 0;

    call->source = arguments[count - 1];
    call->flags = calloc(count + 1, sizeof *call->flags);
    for (int i = 1; i < count - 1; i++) {
        char *argument = arguments[i];

        if (starts(argument, "-DKBUILD_MODFILE=") || starts(argument, "-DKBUILD_BASENAME=") ||
            starts(argument, "-DKBUILD_MODNAME=") || starts(argument, "-D__KBUILD_MODNAME=")) {
            note_name(call, argument);
            names++;
        } else if (!strcmp(argument, "-include")) {
            char *header = arguments[++i];

            /* The three that begin every file are in the precompiled header. */
            if (ends(header, "/linux/compiler-version.h") || ends(header, "/linux/kconfig.h") ||
                ends(header, "/linux/compiler_types.h"))
                continue;
            call->flags[call->count++] = argument;
            call->flags[call->count++] = header;
        } else if (!strcmp(argument, "-o")) {
            call->object = arguments[++i];
        } else if (!strcmp(argument, "-c")) {
            compiles = 1;
        } else if (starts(argument, "-Wp,-MMD,")) {
            call->depends = argument + strlen("-Wp,-MMD,");
        } else if (!strcmp(argument, "-m16") || !strcmp(argument, "-m32") ||
                   !strcasecmp(argument, "-fpic") || !strcasecmp(argument, "-fpie") ||
                   !strcmp(argument, "-D__DISABLE_EXPORTS")) {
            return 0;
        } else if (starts(argument, "-W") && !starts(argument, "-Werror=") &&
                   !starts(argument, "-Wp,") && !starts(argument, "-Wa,")) {
            /* Warnings are not shown; looking for them takes gcc time. */
        } else {
            if (!strcmp(argument, "-O2"))
                call->level = "speed";
            else if (!strcmp(argument, "-Os"))
                call->level = "size";
            call->flags[call->count++] = argument;
        }
    }
    call->flags[call->count++] = "-w";
    return compiles && names == 4 && call->object && call->depends && call->level &&
           strlen(call->defines) < sizeof call->defines - 1;
}

static int is_alone(const char *object)
{
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++)
        if (!strcmp(object, alone[i]))
            return 1;
    return 0;
}

/* Compiles with what is precompiled under that path; gcc's status. */
static int compile(const struct call *call, const char *path)
{
    char **command = calloc(call->count + 12, sizeof *command);
    char *names = text("%s.names.h", call->object);
    int n = 0, i, status;

    /* The prefix of a file that sets none of its own. */
    write_file(names,
               text("%s#define pr_fmt(fmt) fmt\n#define dev_fmt(fmt) fmt\n", call->defines));
    command[n++] = "gcc";
    command[n++] = text("-I%s.seen", path);
    /* Before all other -include, as gcc wants it: they are read in order. */
    for (i = 0; i < call->count && strcmp(call->flags[i], "-include"); i++)
        command[n++] = call->flags[i];
    command[n++] = "-include";
    command[n++] = text("%s.h", path);
    for (; i < call->count; i++)
        command[n++] = call->flags[i];
    char *rest[] = { "-include", names, "-c", "-o", (char *)call->object, (char *)call->source };
    for (i = 0; i < 6; i++)
        command[n++] = rest[i];
    status = run(command);
    unlink(names);
    return status;
}

int main(int count, char **arguments)
{
    const char *folder = getenv("JIFFY_PCH"), *make = getenv("JIFFY_PCH_MAKE"), *name = "common";
    struct call call = { 0 };
    char *path, *words;
    size_t length;

    called = arguments;
    if (!folder || count < 20 || !ends(arguments[count - 1], ".c") ||
        !understood(&call, count, arguments) || is_alone(call.object))
        plain();
    make = make && strstr(make, text(" %s ", call.object)) ? make : NULL;
    /* Where few files of the network are compiled at this level, it has no header of its own. */
    if ((starts(call.object, "net/") || starts(call.object, "drivers/net/")) &&
        (make || access(text("%s/%s/network.words", folder, call.level), R_OK) == 0))
        name = "network";
    path = text("%s/%s/%s", folder, call.level, name);
    if (make)
        precompile(path, text("%s/%s.all.h", folder, name), call.flags, call.count);
    words = read_file(text("%s.words", path), &length);
    if (!words || !harmless(call.source, words))
        plain();
    /* The file may rely on a header being absent: plain gcc compiles it. */
    if (compile(&call, path) != 0 || is_marked(call.object))
        plain();
    /* Each build starts in an empty folder and needs no dependencies; those of a
     * precompiled header would be tens of megabytes to read. */
    write_file(call.depends, text("%s: %s\n", call.object, call.source));
    return 0;
}
