resource "aws_vpc" "main" {
  cidr_block           = "10.0.0.0/16"
  enable_dns_hostnames = true
  tags                 = { Name = local.name }
}

# Its default group allows nothing: what forgets to name a group reaches nothing.
resource "aws_default_security_group" "closed" {
  vpc_id = aws_vpc.main.id
}

resource "aws_subnet" "public" {
  for_each          = { for number, zone in local.zones : zone => number }
  vpc_id            = aws_vpc.main.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(aws_vpc.main.cidr_block, 8, each.value)
  tags              = { Name = "${local.name}-public-${each.key}", "kubernetes.io/role/elb" = "1" }
}

resource "aws_subnet" "private" {
  for_each          = { for number, zone in local.zones : zone => number }
  vpc_id            = aws_vpc.main.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(aws_vpc.main.cidr_block, 4, each.value + 1)
  tags              = { Name = "${local.name}-private-${each.key}", "kubernetes.io/role/internal-elb" = "1" }
}

resource "aws_internet_gateway" "main" {
  vpc_id = aws_vpc.main.id
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.main.id
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.main.id
  }
}

resource "aws_route_table_association" "public" {
  for_each       = aws_subnet.public
  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

locals {
  nat_zones = var.nat_per_zone ? local.zones : slice(local.zones, 0, 1)
}

resource "aws_eip" "nat" {
  for_each = toset(local.nat_zones)
  domain   = "vpc"
}

resource "aws_nat_gateway" "main" {
  for_each      = toset(local.nat_zones)
  allocation_id = aws_eip.nat[each.key].id
  subnet_id     = aws_subnet.public[each.key].id
  depends_on    = [aws_internet_gateway.main] # without a way out of the VPC AWS may refuse it
}

resource "aws_route_table" "private" {
  for_each = toset(local.zones)
  vpc_id   = aws_vpc.main.id
  route {
    cidr_block     = "0.0.0.0/0"
    nat_gateway_id = aws_nat_gateway.main[var.nat_per_zone ? each.key : local.zones[0]].id
  }
}

resource "aws_route_table_association" "private" {
  for_each       = aws_subnet.private
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[each.key].id
}

# Bundles and data do not pass the NAT gateway, which is billed by the gigabyte.
resource "aws_vpc_endpoint" "s3" {
  vpc_id          = aws_vpc.main.id
  service_name    = "com.amazonaws.${var.region}.s3"
  route_table_ids = [for table in aws_route_table.private : table.id]
}

# One group a service; only the cluster's nodes reach it.
locals {
  services = { valkey = 6379, kafka = 9096, database = 5432, files = 2049 }
}

resource "aws_security_group" "service" {
  for_each    = local.services
  name        = "${local.name}-${each.key}"
  description = "${each.key} of ${local.name}: from the cluster's pods alone"
  vpc_id      = aws_vpc.main.id
}

resource "aws_vpc_security_group_ingress_rule" "service" {
  for_each                     = local.services
  security_group_id            = aws_security_group.service[each.key].id
  description                  = "pods"
  referenced_security_group_id = aws_eks_cluster.main.vpc_config[0].cluster_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = each.value
  to_port                      = each.value
}
