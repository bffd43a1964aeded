"""The scripts of the rows whose runtime is no script's: compilers, and machines that compile."""

GCC = """
cat > part.c <<'END'
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *add(void *times) {
    for (long n = (long)times; n > 0; n--) {
        pthread_mutex_lock(&lock);
        count++;
        pthread_mutex_unlock(&lock);
    }
    return 0;
}
int main(void) {
    pthread_t threads[4];
    for (int n = 0; n < 4; n++) if (pthread_create(&threads[n], 0, add, (void *)1000L)) return 1;
    for (int n = 0; n < 4; n++) pthread_join(threads[n], 0);
    fflush(stdout);
    pid_t child = vfork();
    if (child == 0) { execlp("echo", "echo", "from a child", (char *)0); _exit(1); }
    int status;
    waitpid(child, &status, 0);
    printf("%d %d\\n", count, status);
    return system("exit 3") >> 8;
}
END
gcc -std=gnu11 -O2 -Wall -Wextra -g -pthread -pipe -flto -o part part.c && ./part
echo $?
gcc -shared -fPIC -o lib.so -x c - <<'END'
int twice(int n) { return 2 * n; }
END
python3 -c 'import ctypes; print(ctypes.CDLL("./lib.so").twice(21))'
"""
MUSL = """
cat > part.c <<'END'
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
static void *add(void *count) {
    __atomic_add_fetch((int *)count, 1, __ATOMIC_SEQ_CST);
    return 0;
}
int main(void) {
    pthread_t threads[8];
    int count = 0, status;
    for (int n = 0; n < 8; n++) if (pthread_create(&threads[n], 0, add, &count)) return 1;
    for (int n = 0; n < 8; n++) pthread_join(threads[n], 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) { execlp("echo", "echo", "from a child", (char *)0); _exit(1); }
    waitpid(child, &status, 0);
    FILE *pipe = popen("echo through a pipe", "r");
    char line[64];
    if (fgets(line, sizeof line, pipe)) fputs(line, stdout);
    printf("%d %d %d\\n", count, status, pclose(pipe));
    return 0;
}
END
for how in "" -static; do musl-gcc $how -O2 -pthread -o part part.c && ./part; done
"""
JVM = """
cat > Program.java <<'END'
import java.net.*;
import java.nio.file.*;
import java.util.concurrent.*;
import java.util.stream.*;
public class Program {
    static long fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
    public static void main(String[] words) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(8);
        Callable<Long> work = () -> LongStream.range(0, 100000).sum();
        long sum = 0;
        for (Future<Long> each : pool.invokeAll(java.util.Collections.nCopies(16, work)))
            sum += each.get();
        pool.shutdown();
        System.out.println(sum);
        Thread virtual = Thread.ofVirtual().start(() -> System.out.println("from a thread"));
        virtual.join();
        Process child = new ProcessBuilder("echo", "from a child").inheritIO().start();
        System.out.println(child.waitFor() + " " + fib(30));
        Path file = Files.writeString(Path.of("file"), "text");
        System.out.println(Files.readString(file) + " " + Files.size(file));
        try (ServerSocket server = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
            Thread answer = new Thread(() -> {
                try (Socket one = server.accept()) {
                    one.getOutputStream().write("over loopback".getBytes());
                } catch (Exception error) { System.out.println(error); }
            });
            answer.start();
            try (Socket one = new Socket(server.getInetAddress(), server.getLocalPort())) {
                System.out.println(new String(one.getInputStream().readAllBytes()));
            }
        }
        System.gc();
    }
}
END
javac Program.java && java -Xmx256m Program
"""
NODE = """
cat > program.js <<'END'
const { Worker, isMainThread, parentPort } = require("worker_threads");
const { execFileSync, spawn } = require("child_process");
const fs = require("fs"), http = require("http");
const crypto = require("crypto"), zlib = require("zlib");
if (!isMainThread) { parentPort.postMessage("from a thread"); return; }
async function main() {
  fs.writeFileSync("a", "text");
  fs.copyFileSync("a", "b");
  await fs.promises.rename("b", "c");
  console.log(fs.readdirSync(".").sort().join(), await fs.promises.readFile("c", "utf8"));
  console.log(await new Promise((done) => new Worker(__filename).once("message", done)));
  console.log(execFileSync("echo", ["from a child"]).toString().trim());
  console.log(crypto.createHash("sha256").update("x").digest("hex").slice(0, 8));
  console.log(zlib.gunzipSync(zlib.gzipSync("packed")).toString());
  console.log(crypto.randomBytes(16).length, crypto.scryptSync("a", "b", 8).toString("hex"));
  const server = http.createServer((_, answer) => answer.end("over loopback"));
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  const answer = await fetch(`http://127.0.0.1:${server.address().port}/`);
  console.log(await answer.text());
  server.close(); server.closeAllConnections();
  let total = 0;
  for (let n = 0; n < 3e6; n++) total = (total + n * n) % 1000003;
  console.log(total);
}
main();
END
node program.js
echo $?
"""
GO = """
mkdir -p cache tmp app && cd app
export GOCACHE=$PWD/../cache GOTMPDIR=$PWD/../tmp GOPATH=$PWD/../path GOFLAGS=-mod=mod
export GOTOOLCHAIN=local GOPROXY=off CGO_ENABLED=0 GOTELEMETRY=off GOENV=off
cat > go.mod <<'END'
module app
END
cat > main.go <<'END'
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"time"
)

func main() {
	var group sync.WaitGroup
	sums := make(chan int, 100)
	for n := 0; n < 100; n++ {
		group.Add(1)
		go func() { defer group.Done(); time.Sleep(time.Millisecond); sums <- n * n }()
	}
	group.Wait()
	close(sums)
	total := 0
	for each := range sums {
		total += each
	}
	fmt.Println(total)
	out, err := exec.Command("echo", "from a child").Output()
	fmt.Printf("%s%v\\n", out, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go func() {
		one, _ := listener.Accept()
		file, _ := os.Open("go.mod")
		io.Copy(one, file)
		one.Close()
	}()
	two, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		panic(err)
	}
	text, err := io.ReadAll(two)
	fmt.Printf("%q %v\\n", bytes.Fields(text)[:2], err)
	source, _ := os.Open("main.go")
	target, _ := os.Create("copy.go.txt")
	length, err := io.Copy(target, source)
	fmt.Println(length > 500, err)
}
END
go vet . && go build -o ../program . && cd ../app && ../program
echo $?
"""
