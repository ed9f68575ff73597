#include "peers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

constexpr int kPollMs = 50;  // how soon one that waits sees that the group is aborted

std::string text(const Call& call) {
  return (call.is_gather ? "all_gather of " : "all_reduce of ") + std::to_string(call.count) + " values";
}

[[noreturn]] void lost(size_t host, const char* reason) {
  throw std::runtime_error("the connection to host " + std::to_string(host) + " is lost: " + reason);
}

// Result of send or recv; 0 if it would have had to wait.
size_t done_or_throw(ssize_t done, size_t host) {
  if (done < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) lost(host, std::strerror(errno));
  return static_cast<size_t>(std::max<ssize_t>(done, 0));
}

}  // namespace

void must_be_alike(const Call& mine, const Call& other, const char* who, int64_t number) {
  if (mine.is_gather != other.is_gather || mine.count != other.count)
    throw std::runtime_error("this rank is at an " + text(mine) + ", " + who + " " + std::to_string(number) +
                             " at an " + text(other));
}

Peers::Peers(const SharedMemory& memory, const LlmMembership& m) : memory_(memory), host_(static_cast<size_t>(m.host)) {
  if (m.peer_fds) fds_.assign(m.peer_fds, m.peer_fds + m.num_hosts);
}

void Peers::shut_down() const {
  for (const int fd : fds_)
    if (fd >= 0) shutdown(fd, SHUT_RDWR);
}

// Send and receive at the same time, because two hosts that send first could each wait for the other to receive.
void Peers::swap_blocks(size_t bytes) const {
  const size_t hosts = fds_.size();
  std::vector<size_t> sent(hosts), received(hosts);
  std::vector<pollfd> polls(hosts);
  for (;;) {
    bool is_open = false;
    for (size_t host = 0; host < hosts; host++) {
      const int events = (sent[host] < bytes ? POLLOUT : 0) | (received[host] < bytes ? POLLIN : 0);
      polls[host] = {events ? fds_[host] : -1, static_cast<short>(events), 0};
      is_open = is_open || polls[host].fd >= 0;
    }
    if (!is_open) return;
    memory_.check();
    if (poll(polls.data(), hosts, kPollMs) <= 0) continue;
    for (size_t host = 0; host < hosts; host++) {
      if (polls[host].revents & POLLOUT) send_part(host, bytes, &sent[host]);
      if (polls[host].revents & ~POLLOUT) receive_part(host, bytes, &received[host]);
    }
  }
}

void Peers::send_part(size_t host, size_t bytes, size_t* sent) const {
  const char* from = reinterpret_cast<const char*>(&memory_.block(static_cast<int64_t>(host_)));
  *sent += done_or_throw(send(fds_[host], from + *sent, bytes - *sent, MSG_DONTWAIT | MSG_NOSIGNAL), host);
}

void Peers::receive_part(size_t host, size_t bytes, size_t* received) const {
  Header& block = memory_.block(static_cast<int64_t>(host));
  char* into = reinterpret_cast<char*>(&block) + *received;
  const ssize_t done = recv(fds_[host], into, bytes - *received, MSG_DONTWAIT);
  if (done == 0) lost(host, "it was closed");
  *received += done_or_throw(done, host);
  if (*received >= sizeof(Header))
    must_be_alike(memory_.block(static_cast<int64_t>(host_)).call, block.call, "host", static_cast<int64_t>(host));
}
